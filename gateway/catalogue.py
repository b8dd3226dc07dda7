"""The models that are served: what a dialect publishes of each, and what admission enforces. Read from configuration;
whether an engine is up changes nothing here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from gateway.errors import ModelDisabled, ModelNameInvalid, ModelNotFound, ModelRetired, TaskMismatch

TEXT_GENERATION: Final = "Text Generation"
TEXT_EMBEDDINGS: Final = "Text Embeddings"
# What ids are made of, here and wherever clients know them from.
_NAME: Final = re.compile(r"[A-Za-z0-9@._:/+-]{1,200}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model, as published = as enforced.

    created: Unix seconds. context_tokens: prompt and output together. output_tokens_max: of one choice. precisions: of
    prefill weights, decode weights and KV cache, as served. price: its id in the price book; empty: the model's own.
    revision: changes with what is deployed of it. dimensions: of an embedding model's vectors. quality: what those
    precisions were measured to do to the answers.
    retires_at_ns: the instant, Unix time, from which on it is refused; None while no end is planned.
    """

    id: str
    created: int
    owned_by: str
    description: str
    context_tokens: int
    output_tokens_max: int
    precisions: Mapping[str, str]
    task: str = TEXT_GENERATION
    price: str = ""
    dimensions: int | None = None
    quality: Mapping[str, str] = field(default_factory=dict)
    retires_at_ns: int | None = None
    revision: str = ""
    served_as: str = field(init=False)  # its precisions in one word, for records

    def __post_init__(self) -> None:
        object.__setattr__(self, "served_as", served_as(self.precisions))

    @property
    def price_id(self) -> str:
        return self.price or self.id

    @property
    def retires_on(self) -> str | None:
        """The UTC day of its end, as a date."""
        if self.retires_at_ns is None:
            return None
        return datetime.fromtimestamp(self.retires_at_ns // 1_000_000_000, UTC).date().isoformat()

    def retired(self, at_ns: int) -> bool:
        return self.retires_at_ns is not None and at_ns >= self.retires_at_ns


def served_as(precisions: Mapping[str, str]) -> str:
    """In one word, for records."""
    return ",".join(f"{name}={precision}" for name, precision in precisions.items())


class Catalogue:
    """disabled: ids that an operator has switched off; replaced as a whole by whoever keeps it up to date."""

    def __init__(self, cards: Iterable[ModelCard]) -> None:
        self.disabled: frozenset[str] = frozenset()
        self.replace(cards)

    def replace(self, cards: Iterable[ModelCard]) -> None:
        """Publish these from now on."""
        self._cards = {card.id: card for card in cards}

    def get(self, model_id: str) -> ModelCard:
        """Raises ModelNotFound or ModelNameInvalid; no prefix matching, no aliases."""
        card = self._cards.get(model_id)
        if card is None:
            raise (ModelNotFound if _NAME.fullmatch(model_id) else ModelNameInvalid)(model_id[:200])
        return card

    def find(self, model_id: str) -> ModelCard | None:
        return self._cards.get(model_id)

    def in_service(self, model_id: str, at_ns: int) -> ModelCard:
        """Raises ModelNotFound, ModelRetired for one that is no longer served at this instant, or ModelDisabled."""
        card = self.get(model_id)
        if card.retired(at_ns):
            raise ModelRetired(model_id, card.retires_on or "")
        if model_id in self.disabled:
            raise ModelDisabled(model_id)
        return card

    def get_for(self, task: str, model_id: str, at_ns: int) -> ModelCard:
        """Raises as in_service, or TaskMismatch for a model of another task."""
        card = self.in_service(model_id, at_ns)
        if card.task != task:
            raise TaskMismatch(model_id, card.task)
        return card

    def all(self) -> tuple[ModelCard, ...]:
        return tuple(self._cards.values())
