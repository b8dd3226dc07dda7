"""What is told of a deployed model: its card for tenants, and what each revision of it is for records. Pure but for
reading the tokenizer's folder. Used by deployed.py.
"""

import hashlib
import json
from collections.abc import Iterable
from datetime import UTC, date, datetime

from backends.engine_tables import Engine, Role
from backends.topology import DeploymentInvalid, Model
from gateway.catalogue import ModelCard, served_as
from gateway.replica import Served

# What a model is served for, and how, is the same deployment; so is one with another share of requests.
_NOT_DEPLOYED = {"serverless", "rollout"}


def card_of(model: Model) -> ModelCard:
    """What tenants are told. Precisions that differ between replicas are all named. Raises DeploymentInvalid."""
    try:
        config_path = model.tokenizer / "config.json"
        config, created = json.loads(config_path.read_text()), int(config_path.stat().st_mtime)
    except (OSError, ValueError) as error:
        raise DeploymentInvalid(f"{model.tokenizer}/config.json can't be read: {error}") from error
    parts = model.id.split("/")
    return ModelCard(
        id=model.id,
        created=created,
        owned_by=parts[-2] if len(parts) > 1 else "pagegate",
        description=f"{config.get('model_type', 'language')} model with a context of "
        f"{model.limits.context_tokens} tokens.",
        revision=_deployment(model.of_revision(model.old_revision)),
        context_tokens=model.limits.context_tokens,
        output_tokens_max=model.limits.output_tokens_max,
        precisions=_precisions(model),
        price=model.price,
        retires_at_ns=_midnight_ns(model.deprecation_date),
        quality=model.quality,
    )


def served_of(model: Model, revision: str, *engines: Engine) -> Served:
    """engines: of the replica, one or both halves of a pair."""
    alone = model.of_revision(revision)
    return Served(revision, _deployment(alone), served_as(_precisions(alone)), _weights(model, engines))


def _precisions(model: Model) -> dict[str, str]:
    return {
        "prefill_weights": ", ".join(
            sorted({_of(engine, role) for _, role, engine in model.engines() if role != "decode"})
        ),
        "decode_weights": ", ".join(
            sorted({_of(engine, "decode") for _, role, engine in model.engines() if role != "prefill"})
        ),
        "kv_cache": model.kv_cache_dtype,
    }


def _of(engine: Engine, role: Role) -> str:
    weights = engine.weights
    return (weights.decode_precision if role == "decode" else None) or weights.precision


def _deployment(model: Model) -> str:
    """A word that changes with what is deployed."""
    said_nothing = set() if model.groups else {"groups"}  # files without any keep their word
    return hashlib.sha256(model.model_dump_json(exclude=_NOT_DEPLOYED | said_nothing).encode()).hexdigest()[:12]


def _weights(model: Model, engines: Iterable[Engine]) -> str:
    """A word that changes with whatever changes what stands in a page for the same tokens."""
    words: list[str | None] = [model.kv_cache_dtype]
    for engine in engines:
        loaded = engine.weights
        words += [loaded.digest or loaded.checkpoint, loaded.precision, loaded.decode_precision, loaded.quantization]
        words += [loaded.kv_scales_digest or str(loaded.kv_scales or "")]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def _midnight_ns(day: date | None) -> int | None:
    """The UTC instant at which the day begins."""
    if day is None:
        return None
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000_000
