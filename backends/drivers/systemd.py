"""An engine as a unit of systemd on this machine: `systemctl start`, `stop`, `is-active`.

Whoever runs the gateway needs leave to do so: deploy/systemd/60-pagegate.rules gives it by polkit.
"""

import asyncio
from typing import Final

from backends.errors import BackendError

# `stop` waits for the unit's own TimeoutStopSec, which lets answers end; the others are a message to systemd.
_STOP_S_MAX: Final = 900.0
_ASK_S_MAX: Final = 10.0
_WORDS_MAX: Final = 400
# As `is-active` names them: it runs, or is on its way.
_RUNS: Final = frozenset({"active", "activating", "reloading", "refreshing"})


class SystemdSwitch:
    """Implements Switch."""

    def __init__(self, service: str, *, systemctl: str = "systemctl") -> None:
        self._service = service
        self._systemctl = systemctl

    async def on(self) -> None:
        # A unit that has failed too often starts again only after this.
        await self._call("reset-failed", within_s=_ASK_S_MAX, checked=False)
        await self._call("start", "--no-block", within_s=_ASK_S_MAX)

    async def off(self) -> None:
        await self._call("stop", within_s=_STOP_S_MAX)

    async def runs(self) -> bool:
        """`is-active` says by its exit code what it says in words; words of no known state are an error."""
        said = (await self._call("is-active", within_s=_ASK_S_MAX, checked=False)).strip()
        if not said:
            raise BackendError(f"systemctl doesn't say whether {self._service} is active")
        return said in _RUNS

    async def said(self) -> str:
        asked = ("show", "--property=Result,ExecMainStatus")
        return " ".join((await self._call(*asked, within_s=_ASK_S_MAX, checked=False)).split())

    async def _call(self, verb: str, *options: str, within_s: float, checked: bool = True) -> str:
        """What it prints. Raises BackendError."""
        command = (self._systemctl, "--no-ask-password", verb, *options, "--", self._service)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise BackendError(f"systemctl can't be run: {error}") from error
        try:
            async with asyncio.timeout(within_s):
                out, wrong = await process.communicate()
        except TimeoutError as error:
            raise BackendError(f"systemctl {verb} {self._service} took longer than {within_s:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if checked and process.returncode:
            said = wrong.decode(errors="replace").strip()[-_WORDS_MAX:]
            raise BackendError(f"systemctl {verb} {self._service} failed: {said or process.returncode}")
        return out.decode(errors="replace")
