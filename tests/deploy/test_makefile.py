import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 60


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make` reads, in a folder whose name has a space."""
    copy = tmp_path / "a checkout"
    (copy / "deploy" / "setup" / "web").mkdir(parents=True)
    for name in (
        "Makefile",
        "pyproject.toml",
        "deploy/setup/install.sh",
        "deploy/setup/requirements.lock",
        "deploy/setup/web/package-lock.json",
    ):
        shutil.copy(ROOT / name, copy / name)
    return copy


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=checkout, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
    )


def fake_python(folder: Path, *, new_enough: bool = True, has_venv: bool = True, pip_output: str = "") -> Path:
    """An interpreter that answers as asked, and whose venv holds another one of which pip fails with `pip_output`."""
    script = folder / "fake python"
    script.write_text(
        f"""#!/bin/sh
case "$*" in
    --version) echo "Python 3.9.2" ;;
    *version_info*) exit {0 if new_enough else 1} ;;
    *ensurepip*) exit {0 if has_venv else 1} ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip "*) echo "{pip_output}" > .venv/install.log; exit 1 ;;
esac
"""
    )
    script.chmod(0o755)
    return script


def test_an_old_python_is_refused_in_one_sentence_and_nothing_is_made(checkout: Path, tmp_path: Path) -> None:
    python = fake_python(tmp_path, new_enough=False)
    result = make(checkout, "serve", f"PYTHON={python}")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0] == f"Python 3.11 or newer is needed, and {python} is Python 3.9.2."
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_named(checkout: Path) -> None:
    result = make(checkout, "serve", "PYTHON=/nowhere/python3")
    assert result.returncode != 0
    assert "/nowhere/python3" in result.stderr.splitlines()[0]


def test_a_python_without_venv_says_what_to_install(checkout: Path, tmp_path: Path) -> None:
    result = make(checkout, "serve", f"PYTHON={fake_python(tmp_path, has_venv=False)}")
    assert result.returncode != 0
    assert "apt install python3-venv" in result.stderr.splitlines()[0]
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("pip_output", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "Disk full"),
        ("connection broken by 'NewConnectionError'", "No network"),
        ("ERROR: no matching distribution", "The packages could not be installed"),
    ],
)
def test_a_failed_installation_says_why_and_takes_its_venv_away(
    checkout: Path, tmp_path: Path, pip_output: str, sentence: str
) -> None:
    result = make(checkout, "serve", f"PYTHON={fake_python(tmp_path, pip_output=pip_output)}")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0].startswith(sentence)
    assert not (checkout / ".venv").exists()


def test_a_failed_installation_keeps_a_venv_that_was_there(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(fake_python(tmp_path), checkout / ".venv" / "bin" / "python")
    assert make(checkout, "install").returncode != 0
    assert (checkout / ".venv" / "bin" / "python").exists()


def test_a_second_serve_installs_nothing(checkout: Path) -> None:
    program = checkout / ".venv" / "bin" / "pagegate"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "serving: $*"\n')
    program.chmod(0o755)
    (checkout / ".venv" / ".installed-local").touch()
    result = make(checkout, "serve")
    assert result.returncode == 0
    assert "serving: serve" in result.stdout.splitlines()


def test_help_lists_every_documented_task(checkout: Path) -> None:
    tasks = [line.split()[0] for line in make(checkout).stdout.splitlines() if line.startswith("  ")]
    assert {"help", "serve", "install", "test", "test-fast", "test-search", "check", "bench", "clean"} <= set(tasks)


def test_the_lock_holds_versions_that_every_machine_can_get() -> None:
    lines = (ROOT / "deploy/setup/requirements.lock").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in packages
    for line in packages:
        requirement = line.split(";")[0]
        assert "==" in requirement, line
        assert "+" not in requirement, line
        assert "@" not in requirement, line
