"""Questions that only all workers of a gateway together can answer: what do they hold, what have they counted?

Each worker listens on a Unix socket in a folder that its supervisor made; a question is one JSON line, its answer one
JSON document, and the connection ends. Who does not answer in time is left out of the answers. Routes ask through
Services; what a worker answers is workers/answers.py's. Knows no question's meaning.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

log = structlog.get_logger(__name__)

Answers = Mapping[str, Callable[[dict[str, Any]], Awaitable[Any]]]

# A process beside the workers: the supervisor, which starts engines.
ENGINES: Final = "engines"
ANSWER_S_MAX: Final = 2.0
_QUESTION_BYTES_MAX: Final = 64 * 1024
_ANSWER_BYTES_MAX: Final = 16 << 20


class Siblings:
    """name: of this process among them. others: the workers that it may ask. Without any there are no answers.

    beside: processes that serve no requests, and have counted something all the same.
    """

    def __init__(self, folder: Path, name: str, others: Sequence[str], *, beside: Sequence[str] = ()) -> None:
        self.name = name
        self.others = tuple(others)
        self._folder = folder
        self._beside = tuple(beside)

    async def ask(self, question: str, *, beside_too: bool = False, **words: Any) -> dict[str, Any]:
        """The answer of each that answers in time, by name. Never raises for one that does not."""
        asked = [*self.others, *(self._beside if beside_too else ())]
        if not asked:
            return {}
        line = orjson.dumps({"question": question, "words": words}) + b"\n"
        found = await asyncio.gather(*(self._ask_one(name, line) for name in asked))
        return {name: answer for name, answer in zip(asked, found, strict=True) if answer is not None}

    async def ask_one(self, name: str, question: str, **words: Any) -> Any:
        """The answer of one, also of one beside; None if it does not answer in time."""
        return await self._ask_one(name, orjson.dumps({"question": question, "words": words}) + b"\n")

    async def _ask_one(self, name: str, line: bytes) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                reader, writer = await asyncio.open_unix_connection(socket_path(self._folder, name))
                try:
                    writer.write(line)
                    return orjson.loads(await _read_all(reader))
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):
            return None


ALONE: Final = Siblings(Path(), "", ())


@asynccontextmanager
async def answering(folder: Path, name: str, answers: Answers) -> AsyncIterator[None]:
    """Answer the siblings' questions until the block ends. That the socket is there says that this process serves."""
    path = socket_path(folder, name)
    path.unlink(missing_ok=True)
    handle = partial(_answer, answers)
    server = await asyncio.start_unix_server(handle, path, limit=_QUESTION_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def socket_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.sock"


async def _answer(answers: Answers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            asked = orjson.loads(await reader.readline())
            writer.write(orjson.dumps(await answers[asked["question"]](asked["words"])))
            await writer.drain()
    except (OSError, TimeoutError):
        pass  # whoever asked does without
    except Exception:
        # The rim of a worker's loop: a bug in an answer must not go unseen, and whoever asked does without.
        log.exception("a sibling's question failed")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Raises ValueError if there is more than any answer of ours has."""
    found = bytearray()
    while part := await reader.read(1 << 16):
        found += part
        if len(found) > _ANSWER_BYTES_MAX:
            raise ValueError("an answer without end")
    return bytes(found)
