"""deploy/setup/web.sh: what is in the way of the scripts is one sentence, and a failure only where it must be."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FILES = {
    "htmx.org/dist/htmx.min.js": "vendor/htmx.min.js",
    "htmx.org/dist/ext/hx-sse.min.js": "vendor/hx-sse.min.js",
    "uplot/dist/uPlot.iife.min.js": "vendor/uPlot.iife.min.js",
    "uplot/dist/uPlot.min.css": "vendor/uPlot.min.css",
    "@fontsource-variable/inter/files/inter-latin-wght-normal.woff2": "vendor/inter-latin-wght-normal.woff2",
    "axe-core/axe.min.js": "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    copy = tmp_path / "a checkout"
    shutil.copytree(ROOT / "deploy" / "setup", copy / "deploy" / "setup")
    return copy


def fetch(checkout: Path, mode: str, npm: str) -> subprocess.CompletedProcess[str]:
    """npm: what the machine's npm does, as a shell script."""
    programs = checkout / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "npm").write_text(f"#!/bin/sh\n{npm}\n")
    (programs / "npm").chmod(0o755)
    return subprocess.run(
        ["/bin/sh", "deploy/setup/web.sh", mode],
        cwd=checkout,
        env={"PATH": f"{programs}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _installs() -> str:
    return "\n".join(
        f"mkdir -p 'node_modules/{Path(name).parent}'; echo '{name}' > 'node_modules/{name}'" for name in _FILES
    )


def test_the_scripts_come_from_the_lock_and_are_fetched_once(checkout: Path) -> None:
    assert fetch(checkout, "required", _installs()).returncode == 0
    static = checkout / "api" / "dashboard" / "static"
    for name, kept in _FILES.items():
        assert not kept or (static / kept).read_text().strip() == name
    assert fetch(checkout, "required", "exit 1").returncode == 0, "nothing is fetched again"
    lock = checkout / "deploy" / "setup" / "web" / "package-lock.json"
    lock.write_text(lock.read_text() + "\n")
    assert fetch(checkout, "required", "exit 1").returncode == 1, "a new lock is fetched"


@pytest.mark.parametrize(("mode", "code"), [("optional", 0), ("required", 1)])
def test_a_failed_fetch_is_one_sentence_and_a_failure_only_where_it_is_needed(
    checkout: Path, mode: str, code: int
) -> None:
    result = fetch(checkout, mode, "exit 1")
    assert result.returncode == code
    assert result.stderr.startswith("The dashboard's scripts were not fetched: npm could not fetch them")
    assert len(result.stderr.splitlines()) == 1


def test_every_package_of_the_lock_has_its_hash() -> None:
    lock = (ROOT / "deploy" / "setup" / "web" / "package-lock.json").read_text()
    assert lock.count('"version"') == lock.count('"integrity": "sha512-') == 4
    assert "://" not in lock, "the lock names no registry"
