"""One running generation of the scripted engine: how many tokens are out, what they say, and how it is stopped."""

import asyncio
from dataclasses import dataclass, field

from tests.doubles.script import Script
from tests.doubles.wire import Call


class ConnectionDropped(Exception):
    """The script wants the connection gone."""


class FailedInside(Exception):
    """The script wants an error of the engine's own."""


@dataclass(eq=False, slots=True)
class Generation:
    """Produces its tokens one by one at the script's pace until it ends, is aborted, or its task is cancelled."""

    call: Call
    script: Script
    produced: int = 0
    text: str = ""
    finish_reason: str | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def used_tokens(self) -> int:
        return self.call.prompt_tokens + self.produced

    def stop(self) -> None:
        self.stopped.set()

    async def before_the_first(self) -> None:
        """The silence before anything is answered, and the failures that belong there."""
        await self._pause(self.script.ttft_s)
        if self.script.die_after == 0:
            raise ConnectionDropped
        if self.script.hang_after == 0:
            await self._hang()

    async def next_token(self) -> str | None:
        """The text of the next token, or None when the generation has ended; then finish_reason is set."""
        if self.produced:
            self._fail_as_scripted()
            if self.finish_reason is not None:
                return None
            if self.produced == self.script.hang_after:
                await self._hang()
            await self._pause(self.script.itl_ms / 1000)
        elif self.script.error_after == 0:
            raise FailedInside
        if self.stopped.is_set():
            self.finish_reason = "abort"
            return None
        return self._say()

    def _say(self) -> str | None:
        wanted = self.call.max_tokens if self.script.tokens is None else min(self.script.tokens, self.call.max_tokens)
        if self.produced >= wanted:
            self.finish_reason = self._natural_end()
            return None
        piece = f"w{self.produced} " if self.script.text is None else self.script.text
        self.produced += 1
        said = self.text + piece
        cut_at = min((said.find(stop) for stop in self.call.stop if stop in said), default=-1)
        if cut_at >= 0:
            piece = said[len(self.text) : cut_at]
            self.finish_reason = "stop"
        elif self.produced == wanted:
            self.finish_reason = self._natural_end()
        self.text += piece
        return piece

    def _natural_end(self) -> str:
        return self.script.finish_reason or ("length" if self.produced >= self.call.max_tokens else "stop")

    def _fail_as_scripted(self) -> None:
        if self.produced == self.script.die_after:
            raise ConnectionDropped
        if self.produced == self.script.error_after:
            raise FailedInside

    async def _pause(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self.stopped.wait()
        except TimeoutError:
            return

    async def _hang(self) -> None:
        """Silent until aborted or cancelled; the test's own time limit is the bound."""
        await self.stopped.wait()
