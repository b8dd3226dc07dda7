"""From a checkpoint to an engine that has run each of its products once, and how long each part of that took.

The worker's thread calls it: at the start, and again each time that memory which was released is taken back.
"""

import itertools
import time
from collections.abc import Callable, Mapping
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
        self.seconds: Mapping[str, float] = _NOTHING
        """Of the latest engine, by part."""

    def load(self) -> Engine:
        """Called in the thread that will compute: the number of threads is a property of the calling thread."""
        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        marks = [self._clock()]
        config = LlamaConfig.read(settings.model_path)
        if self._kernels is None:
            self._kernels = _kernels(config, settings)
        marks.append(self._clock())
        model = _model(config, settings, self._kernels)
        marks.append(self._clock())
        engine = Engine(model, settings, self._clock)
        marks.append(self._clock())
        engine.warm_up()
        marks.append(self._clock())
        parts = ("kernels", "weights", "pool", "warm_up")
        took = (after - before for before, after in itertools.pairwise(marks))
        self.seconds = MappingProxyType(dict(zip(parts, took, strict=True)))
        return engine


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
    model = Llama(config, weights, kernels)
    weights.loaded()
    log.info("model_loaded", kernels=model.kernels, weight_bytes=model.weight_bytes)
    return model


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
