"""From token ids to text, piece by piece: never half a character, never a part of a stop string.

The step loop calls it once a token. Tokens of byte-level BPE are byte strings, and one character may span several
tokens, so bytes pass through an incremental UTF-8 decoder, which keeps an unfinished character back.
"""

import codecs
from collections.abc import Sequence


class TextStream:
    """The visible text of one request. `push` returns what may be shown now, `flush` what was kept back."""

    def __init__(self, token_bytes: Sequence[bytes], stop: tuple[str, ...] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = stop
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; once a stop string matched, nothing more is ever shown."""
        if self.matched_stop is not None:
            return ""
        # A padded vocabulary has ids that no token stands for: they show nothing.
        shown = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        return self._release(self._decoder.decode(shown))

    def flush(self) -> str:
        """The rest, at the end: an unfinished character shows as U+FFFD, as a decode of the whole would."""
        if self.matched_stop is not None:
            return ""
        shown = self._release(self._decoder.decode(b"", final=True))
        shown += self._held
        self._held = ""
        return shown

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        text = self._held + new
        matches = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            # The match that ends first wins, so that the result does not depend on where tokens split the text.
            _, at, self.matched_stop = min(matches)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
