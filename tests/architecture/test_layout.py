"""The shape of the project: import contracts, what a process loads, what is documented."""

import subprocess
import sys
from pathlib import Path

import pytest

import api
from api.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "api",
    "gateway",
    "backends",
    "tenancy",
    "billing",
    "deploy",
    "tests",
    "benchmarks",
}


def test_the_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.load
def test_the_api_process_loads_no_torch_and_not_what_only_an_invoice_or_postgresql_needs() -> None:
    program = (
        "import sys, api.app, api.wiring, api.cli.main, api.cli.serve, api.cli.invoices;"
        "sys.exit(' '.join({'torch', 'fpdf', 'numpy', 'PIL', 'psycopg'} & set(sys.modules)) or None)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=100, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_packages_are_not_shadowed_by_their_tests() -> None:
    assert Path(api.__file__).parent == ROOT / "api"


def test_nothing_else_lies_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    tops = {line.split("/")[0] for line in listed.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


def test_every_top_level_setting_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    nested = {"backends", "batches", "gateway", "lifecycle", "tenancy", "billing"}
    missing = [
        name for name in Settings.model_fields if name not in nested and f"PAGEGATE_{name.upper()}" not in readme
    ]
    assert missing == []
