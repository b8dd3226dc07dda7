"""What is served without a deployment file: one model on the embedded engine or one at a URL, and its encoder.

Called by wiring.py, and by the supervisor that starts workers' engines.
"""

import json
from collections.abc import Awaitable, Callable
from functools import partial

from api.embedding_model import embedding_folder
from api.lifecycle import Lifecycle
from api.settings import EMBEDDED_ENGINE, Settings
from backends.checkpoints import DEFAULT_CHECKPOINT, checkpoint_path
from backends.engine_tables import Launch
from backends.local_command import embedded_launch
from backends.supervision import free_port
from backends.topology import Deployment

_ENGINE_HOST = "127.0.0.1"


def embedded_deployment(settings: Settings) -> Deployment:
    """What is served without a deployment file: one model, on the embedded engine or on one at a URL.

    Its limits are the checkpoint's own. `auto` for the cache is the type of the weights, which are bf16.
    """
    backends = settings.backends
    checkpoint = backends.checkpoint or checkpoint_path(DEFAULT_CHECKPOINT, settings.cache_dir)
    context = int(json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"])
    engine = {
        "name": EMBEDDED_ENGINE,
        "weights": {
            "checkpoint": str(checkpoint),
            "precision": backends.prefill_weights,
            "decode_precision": backends.decode_weights,
        },
        "url": backends.url,
        "launch": None if backends.url else _embedded_launch(settings),
    }
    model = {
        "id": settings.model_id,
        "price": settings.model_id,
        "tokenizer": checkpoint,
        # A prompt has at least one token.
        "limits": {"context_tokens": context, "output_tokens_max": context - 1},
        "kv_cache_dtype": "bf16" if backends.kv_cache_dtype == "auto" else backends.kv_cache_dtype,
        "page_tokens": 16,
        "page_tags": False,
        "replicas": [engine],
    }
    return Deployment.model_validate({"models": [model]})


def _embedded_launch(settings: Settings) -> Launch:
    folder = embedding_folder(settings) if settings.backends.embedding_url is None else None
    encoder = None if folder is None else (folder, settings.embedding_model_id)
    return embedded_launch(
        settings.backends, settings.cache_dir, _ENGINE_HOST, free_port(_ENGINE_HOST), encoder=encoder
    )


def embedding_url(settings: Settings, deployment: Deployment) -> str:
    """Of the engine that was named for it, else of the embedded one."""
    return settings.backends.embedding_url or deployment.models[0].replicas[0].base_url


def awake_at(
    url: str, settings: Settings, deployment: Deployment, lifecycle: Lifecycle
) -> Callable[[], Awaitable[None]] | None:
    """An encoder of one of the deployment's engines sleeps with it, and a request for it wakes it. None: it has another
    engine, which nobody here puts to sleep.
    """
    for model in deployment.models:
        for replica in model.replicas:
            if replica.base_url == url:
                return partial(
                    lifecycle.waking.until_awake,
                    model.id,
                    wait_s=settings.gateway.queue_wait_seconds_max,
                    among=(replica.name,),
                    named=settings.embedding_model_id,
                )
    return None
