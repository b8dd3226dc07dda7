"""Which embedding model is served, from which folder, and what is published of it. Read by whoever starts engines."""

import json
from pathlib import Path

from api.settings import Settings
from backends.checkpoints import EMBEDDING_CHECKPOINT, checkpoint_path
from gateway.catalogue import TEXT_EMBEDDINGS, ModelCard


def embedding_folder(settings: Settings) -> Path | None:
    """The folder of its tokenizer and config; None if embeddings are not served."""
    if not settings.embeds:
        return None
    return settings.backends.embedding_checkpoint or checkpoint_path(EMBEDDING_CHECKPOINT, settings.cache_dir)


def embedding_card(model_id: str, folder: Path) -> ModelCard:
    """What the checkpoint says of itself. Raises OSError or ValueError if its config can't be read."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    context, dimensions = int(config["max_position_embeddings"]), int(config["hidden_size"])
    return ModelCard(
        id=model_id,
        created=int(path.stat().st_mtime),
        owned_by=model_id.split("/")[-2] if "/" in model_id else "pagegate",
        description=f"{config.get('model_type', 'embedding')} encoder of texts of up to {context} tokens.",
        context_tokens=context,
        output_tokens_max=0,
        precisions={"weights": "fp32"},
        task=TEXT_EMBEDDINGS,
        dimensions=dimensions,
    )
