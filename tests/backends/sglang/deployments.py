"""Deployments for tests: the examples that are shipped, and a small one to change."""

from pathlib import Path
from typing import Any

from backends.topology import Deployment, Model, read_deployment

EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"


def example(name: str) -> Model:
    """The one model of a shipped example."""
    [model] = read_deployment(EXAMPLES / name).models
    return model


def attached(**fields: Any) -> Model:
    """A model with one replica at a URL; fields replace the defaults."""
    merged = {
        "id": "m",
        "price": "m",
        "tokenizer": "/m",
        "limits": {"context_tokens": 8192, "output_tokens_max": 4096},
        "kv_cache_dtype": "fp8_e4m3",
        "page_tokens": 64,
        "page_tags": False,
        "replicas": [{"name": "a", "url": "http://h", "weights": {"checkpoint": "/m", "precision": "fp8"}}],
    } | fields
    return Deployment.model_validate({"models": [merged]}).models[0]
