"""From a checkpoint to an engine that has run each of its products once, and how long each part of that took.

The worker's thread calls it: at the start, and again each time that memory which was released is taken back.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import structlog
import torch

from backends.local.engine import Engine
from backends.local.kernels.choice import choose_kernels
from backends.local.kernels.native import Shape
from backends.local.kernels.protocol import Kernels
from backends.local.kernels.torch_kernels import TorchKernels
from backends.local.kv.pool import stored_dtype
from backends.local.models.llama import Llama, LlamaConfig
from backends.local.settings import EngineSettings
from backends.local.weights import Checkpoint, LayerWeights

log = structlog.get_logger(__name__)

_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


class EngineLoader:
    """Makes one engine after the other, by the same settings. What was compiled for the first serves all."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._kernels: Kernels | None = None
        self._begun: _Begun | None = None
        self.seconds: Mapping[str, float] = _NOTHING
        """Of the latest engine, by part; parts overlap, `total` is from their beginning to their end."""

    def begin(self, before: Mapping[str, float]) -> None:
        """Read the weights in a thread from now on, while the rest of the process is imported.

        before: the seconds that the process has taken until now, by part.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="first weights")
        self._begun = _Begun(before, self._clock(), thread.submit(self._read))
        thread.shutdown(wait=False)

    def load(self) -> Engine:
        """Called in the thread that will compute: the number of threads is a property of the calling thread."""
        begun, self._begun = self._begun, None
        before, began = (_NOTHING, self._clock()) if begun is None else (begun.before, begun.at)
        read = self._read() if begun is None else begun.reading.result()
        marks = [self._clock()]
        torch.set_num_threads(_cores(self._settings))
        engine = Engine(read.model, self._settings, self._clock)
        marks.append(self._clock())
        with _one_thread():
            engine.warm_up()
        marks.append(self._clock())
        parts = {"pool": marks[1] - marks[0], "warm_up": marks[2] - marks[1]}
        total = {"total": sum(before.values()) + marks[2] - began}
        self.seconds = MappingProxyType({**before, **read.seconds, **parts, **total})
        return engine

    def _read(self) -> "_Read":
        began = self._clock()
        config = LlamaConfig.read(self._settings.model_path)
        if self._kernels is None:
            self._kernels = _kernels(config, self._settings)
        chosen = self._clock()
        model = _model(config, self._settings, self._kernels)
        return _Read(model, {"kernels": chosen - began, "weights": self._clock() - chosen})


@dataclass(frozen=True, slots=True)
class _Read:
    model: Llama
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Begun:
    before: Mapping[str, float]
    at: float
    reading: "Future[_Read]"


def load_engine(settings: EngineSettings, clock: Callable[[], float]) -> Engine:
    """One engine, and nothing kept for another."""
    return EngineLoader(settings, clock).load()


def load_model(settings: EngineSettings) -> Llama:
    """A model without pages."""
    config = LlamaConfig.read(settings.model_path)
    return _model(config, settings, _kernels(config, settings))


def _model(config: LlamaConfig, settings: EngineSettings, kernels: Kernels) -> Llama:
    checkpoint = Checkpoint(settings.model_path, config.dtype)
    weights = LayerWeights(checkpoint, (settings.prefill_weights, settings.decode_weights))
    # A core makes a layer alone: threads that shared one would wait for each other at every product (threads.py).
    with (
        _one_thread(),
        ThreadPoolExecutor(
            _cores(settings), thread_name_prefix="weights", initializer=partial(torch.set_num_threads, 1)
        ) as pool,
    ):
        model = Llama(config, weights, kernels, pool)
    weights.loaded()
    log.info("model_loaded", kernels=model.kernels, weight_bytes=model.weight_bytes)
    return model


def _cores(settings: EngineSettings) -> int:
    return settings.threads or torch.get_num_threads()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _kernels(config: LlamaConfig, settings: EngineSettings) -> Kernels:
    if not settings.compiled_kernels:
        return TorchKernels()
    shape = Shape(
        dtype=config.dtype,
        hidden_size=config.hidden_size,
        inner_size=config.inner_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
    )
    return choose_kernels(shape, stored_dtype(settings.kv_cache_dtype, config.dtype), settings.kernel_cache)
