"""Bounds of the conversation with engines, and how the embedded one is launched."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from backends.round_trips import RegionName


class BackendSettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_ENGINE__*` or the TOML table `[engine]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$",
        description="Attach to the engine at this URL; without it the embedded engine is launched.",
    )
    checkpoint: Path | None = Field(
        default=None,
        description="Folder with tokenizer.json, tokenizer_config.json and config.json of the model; "
        "without it the embedded default's checkpoint, fetched at the first start.",
    )
    embedding_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$",
        description="Attach to the embedding engine at this URL; without it the embedded engine serves embeddings.",
    )
    embedding_checkpoint: Path | None = Field(
        default=None,
        description="Folder with tokenizer.json and config.json of the embedding model; "
        "without it the embedded default's, fetched at the first start.",
    )
    embedding_region: RegionName | None = Field(
        default=None, description="Where the embedding engine at that URL is; None: where the gateway is."
    )
    kv_cache_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="Size of the embedded engine's KV cache in bytes."
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8_e4m3"] = Field(
        default="auto", description="What the embedded engine's KV cache holds; auto: the model's own type."
    )
    prefill_weights: Literal["bf16", "fp8", "int4"] = Field(
        default="bf16", description="What the embedded engine computes prompts with; bf16: as the checkpoint has them."
    )
    decode_weights: Literal["bf16", "fp8", "int4"] = Field(
        default="bf16", description="What the embedded engine computes produced tokens with."
    )
    threads: int | None = Field(default=None, ge=1, description="Threads of the embedded engine; None: all cores.")
    running_requests_max: int = Field(default=32, ge=1, description="Requests the embedded engine runs at once.")
    connect_timeout_s: float = Field(default=5.0, gt=0, description="Bound on making a connection to an engine.")
    silence_s_max: float = Field(
        default=120.0,
        gt=0,
        description="An engine that sends nothing for this long on an open stream has failed, and so has one "
        "that shows no work for this long while a whole answer is waited for.",
    )
    answer_s_max: float = Field(
        default=900.0, gt=0, description="Bound on a whole answer that is not streamed (at most 1,024 tokens)."
    )
    start_s_max: float = Field(default=120.0, gt=0, description="An engine that is not ready after this has failed.")
