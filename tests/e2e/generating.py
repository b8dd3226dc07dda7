"""A gateway in front of the real local engine with random weights: nonsense, but in the form that was asked for."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import LocalEngine, build_tiny_checkpoint, start_local_engine
from tests.tiny_encoder import build_tiny_encoder

EMBEDDING_MODEL = "@cf/test/tiny-encoder"


@contextlib.contextmanager
def generating_engine(folder: Path) -> Iterator[LocalEngine]:
    """One process for a language model and an encoder, both tiny."""
    build_tiny_encoder(folder / "encoder")
    tiny = build_tiny_checkpoint(folder / "tiny", max_position_embeddings=4096)
    with start_local_engine(
        tiny,
        kv_cache_bytes=16 << 20,
        embedding_model_path=folder / "encoder",
        embedding_model_name=EMBEDDING_MODEL,
    ) as engine:
        yield engine


@contextlib.asynccontextmanager
async def generating_service(home: Path, folder: Path, engine: LocalEngine) -> AsyncIterator[Service]:
    """folder: where generating_engine made its models."""
    attached = {
        "url": engine.url,
        "checkpoint": folder / "tiny",
        "embedding_url": engine.url,
        "embedding_checkpoint": folder / "encoder",
    }
    async with (
        ScriptedEngine() as idle,
        running_service(home, folder / "tiny", idle, backends=attached, embedding_model_id=EMBEDDING_MODEL) as service,
    ):
        yield service
