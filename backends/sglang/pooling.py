"""Vectors of SGLang's encoders pooled as their folder says (`1_Pooling/config.json`). SGLang alone loads this.

Entry point `pagegate-pooling` of the group `sglang.srt.plugins`. SGLang 0.5.23 takes an encoder of BERT's kind by its
first token, whatever the encoder was trained for; it can pool by the mean, and is told to here. A folder that asks for
what is not served keeps the server from starting; one that says nothing is left to SGLang.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from backends.pooling import pooling_of

log = logging.getLogger(__name__)


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import (  # type: ignore[import-not-found]  # noqa: PLC0415  SGLang's own environment has it, ours has not
        HookRegistry,
        HookType,
    )

    for target, hook in HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _build(original: Callable[..., Any], model: Any, *arguments: Any, **options: Any) -> None:
    """BertModel's constructor. A cross-encoder, which pools by weights of its own, is left alone."""
    original(model, *arguments, **options)
    if model.use_bert_pooler:
        return
    from sglang.srt.layers.pooler import PoolingType  # type: ignore[import-not-found]  # noqa: PLC0415  as above
    from sglang.srt.runtime_context import get_model  # type: ignore[import-not-found]  # noqa: PLC0415  as above

    folder = Path(get_model().model_path)
    pooling = pooling_of(folder)
    if pooling is not None:
        model.pooler.pooling_type = PoolingType[pooling.upper()]
        log.info("vectors are pooled by %s, as %s says", pooling, folder)


def _pool(original: Callable[..., Any], pooler: Any, hidden_states: Any, forward_batch: Any) -> Any:
    """SGLang takes means as differences of running sums over the whole batch, which short floats can't hold."""
    if pooler.pooling_type.name == "MEAN":
        hidden_states = hidden_states.float()
    return original(pooler, hidden_states, forward_batch)


HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.models.bert.BertModel.__init__": _build,
    "sglang.srt.layers.pooler.Pooler.forward": _pool,
}
