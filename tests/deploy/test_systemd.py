"""The units are what systemd takes. Where there is no systemd-analyze, this says that they were not looked at."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_is_what_systemd_takes(unit: Path, tmp_path: Path) -> None:
    # It looks whether the program is there: here it lies elsewhere.
    program = Path(sys.executable).with_name("pagegate")
    copy = tmp_path / unit.name.replace("@.", "@a.")
    copy.write_text(unit.read_text().replace("/opt/pagegate/.venv/bin/pagegate", str(program)))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_stop_gives_answers_their_time_and_reaches_the_supervisor_alone() -> None:
    text = (DEPLOY / "systemd" / "pagegate.service").read_text()
    assert "KillMode=mixed" in text
    assert "TimeoutStopSec=1880" in text
