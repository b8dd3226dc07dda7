"""What a prefill process hands to a decode process for one request, and what makes it acceptable. No I/O, no torch.

A page's tag says whose it is, not what is in it: so the bytes have a checksum, and the request is named by its prompt's
digest as well as by its room. A fence, drawn anew for each connection, keeps a late answer to an earlier one out.
"""

import hashlib
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from backends.local.sequence import Failure, TokenLogprob

PREFILL_LOST = Failure(500, "InternalServerError", "Lost connection with prefill instance")
DECODE_LOST = Failure(500, "InternalServerError", "Decode instance could be dead: nobody took the pages")
GARBLED = Failure(500, "InternalServerError", "The pages that prefill sent are not those of this request")


class Hello(BaseModel):
    """Decode's first words: which request it takes pages for, and of which shape its cache is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    room: int
    fence: str
    prompt_digest: str
    layout: str


class Header(BaseModel):
    """What prefill says of the bytes that follow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fence: str
    prompt_digest: str
    layout: str
    first_token: int
    logprob: TokenLogprob | None
    cached_tokens: int
    size: int
    """Bytes that follow."""
    checksum: int


@dataclass(frozen=True, slots=True)
class Handover:
    """A prompt's pages as bytes, and the token that prefill sampled after it."""

    prompt_digest: str
    layout: str
    first_token: int
    logprob: TokenLogprob | None
    cached_tokens: int
    data: memoryview | bytearray
    checksum: int

    def header(self, fence: str) -> Header:
        return Header(
            fence=fence,
            prompt_digest=self.prompt_digest,
            layout=self.layout,
            first_token=self.first_token,
            logprob=self.logprob,
            cached_tokens=self.cached_tokens,
            size=len(self.data),
            checksum=self.checksum,
        )

    @classmethod
    def of(cls, header: Header, data: bytearray) -> "Handover":
        return cls(
            header.prompt_digest,
            header.layout,
            header.first_token,
            header.logprob,
            header.cached_tokens,
            data,
            header.checksum,
        )

    def belongs_to(self, prompt: Sequence[int], layout: str, size: int) -> bool:
        """Is it whole, of this prompt and of this shape?"""
        return (
            self.prompt_digest == digest(prompt)
            and self.layout == layout
            and len(self.data) == size
            and self.checksum == checksum(self.data)
        )


def digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(array("q", prompt).tobytes()).hexdigest()


def checksum(data: memoryview | bytearray) -> int:
    """CRC-32: it is to find accidents, and a gigabyte takes it less than a second."""
    return zlib.crc32(data)
