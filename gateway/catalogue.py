"""The models that are served: what a dialect publishes of each, and what admission enforces. Read from configuration;
whether an engine is up changes nothing here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.errors import ModelNotFound, TaskMismatch

TEXT_GENERATION: Final = "Text Generation"
TEXT_EMBEDDINGS: Final = "Text Embeddings"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model, as published = as enforced.

    created: Unix seconds. context_tokens: prompt and output together. output_tokens_max: of one choice. precisions: of
    prefill weights, decode weights and KV cache, as served. price: its id in the price book; empty: the model's own.
    dimensions: of an embedding model's vectors. quality: what those precisions were measured to do to the answers.
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

    @property
    def price_id(self) -> str:
        return self.price or self.id


class Catalogue:
    def __init__(self, cards: Iterable[ModelCard]) -> None:
        self.replace(cards)

    def replace(self, cards: Iterable[ModelCard]) -> None:
        """Publish these from now on."""
        self._cards = {card.id: card for card in cards}

    def get(self, model_id: str) -> ModelCard:
        """Raises ModelNotFound; no prefix matching, no aliases."""
        card = self._cards.get(model_id)
        if card is None:
            raise ModelNotFound(model_id[:200])
        return card

    def find(self, model_id: str) -> ModelCard | None:
        return self._cards.get(model_id)

    def get_for(self, task: str, model_id: str) -> ModelCard:
        """Raises ModelNotFound, or TaskMismatch for a model of another task."""
        card = self.get(model_id)
        if card.task != task:
            raise TaskMismatch(model_id, card.task)
        return card

    def all(self) -> tuple[ModelCard, ...]:
        return tuple(self._cards.values())
