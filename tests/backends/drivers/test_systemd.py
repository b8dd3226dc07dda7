"""How systemctl is called, by a program that stands in for it, and what becomes of its refusals."""

from pathlib import Path

import pytest

from backends.drivers.systemd import SystemdSwitch
from backends.errors import BackendError

# Keeps the unit's state in a file beside itself, and every call in another.
STAND_IN = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/calls"
case "$2" in
  start) [ -e "$here/broken" ] && { echo "Unit is masked." >&2; exit 1; }; echo activating > "$here/state" ;;
  stop) echo inactive > "$here/state" ;;
  is-active) cat "$here/state"; [ "$(cat "$here/state")" = active ] ;;
  show) echo "Result=exit-code"; echo "ExecMainStatus=3" ;;
esac
"""
SERVICE = "pagegate-engine@a.service"


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    program = tmp_path / "systemctl"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (tmp_path / "state").write_text("inactive\n")
    return program


def switch(program: Path) -> SystemdSwitch:
    return SystemdSwitch(SERVICE, systemctl=str(program))


async def test_a_unit_is_started_without_waiting_and_stopped_with_it(systemctl: Path) -> None:
    unit = switch(systemctl)
    assert not await unit.runs()
    await unit.on()
    assert await unit.runs(), "activating"
    await unit.off()
    assert not await unit.runs()
    calls = (systemctl.parent / "calls").read_text().splitlines()
    assert calls == [
        f"--no-ask-password {call} -- {SERVICE}"
        for call in ("is-active", "reset-failed", "start --no-block", "is-active", "stop", "is-active")
    ]


@pytest.mark.parametrize(("state", "runs"), [("active", True), ("reloading", True), ("deactivating", False)])
async def test_its_states_are_read_by_their_words(systemctl: Path, state: str, runs: bool) -> None:  # noqa: FBT001 - a table's column
    (systemctl.parent / "state").write_text(f"{state}\n")
    assert await switch(systemctl).runs() is runs


async def test_a_refusal_is_said_in_systemd_s_words(systemctl: Path) -> None:
    (systemctl.parent / "broken").touch()
    with pytest.raises(BackendError, match=r"start pagegate-engine@a\.service failed: Unit is masked"):
        await switch(systemctl).on()


async def test_why_it_ended_is_asked_for(systemctl: Path) -> None:
    assert await switch(systemctl).said() == "Result=exit-code ExecMainStatus=3"


async def test_a_state_that_is_not_said_is_an_error_and_not_asleep(systemctl: Path) -> None:
    (systemctl.parent / "state").write_text("")
    with pytest.raises(BackendError, match="doesn't say"):
        await switch(systemctl).runs()


async def test_a_machine_without_systemd_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="can't be run"):
        await switch(tmp_path / "nowhere").on()
