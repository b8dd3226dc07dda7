"""The engine's settings, read once from its command line by `server.py`; flags are named as SGLang's."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from backends.local.precision import KVPrecision, WeightPrecision

GIB = 1 << 30


class Role(StrEnum):
    """What a process does: everything, or one half of it as a part of a pair (pair/__init__.py)."""

    UNIFIED = "null"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model_path: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30000
    kv_cache_bytes: int = GIB
    max_total_tokens: int | None = None
    """Size of the page pool in tokens instead of bytes."""
    kv_cache_dtype: KVPrecision = KVPrecision.AUTO
    prefill_weights: WeightPrecision = WeightPrecision.BF16
    decode_weights: WeightPrecision = WeightPrecision.BF16
    compiled_kernels: bool = True
    kernel_cache: Path | None = None
    """Folder that keeps compiled kernels; None: they are compiled at each start."""
    page_size: int = 16
    max_running_requests: int = 32
    max_queued_requests: int = 256
    chunked_prefill_size: int = 512
    context_length: int | None = None
    """None: what the checkpoint's config says."""
    threads: int | None = None
    """None: as many as pay at the moment, one per usable core at most."""
    page_tags: bool = True
    """Compare every page that a step reads or writes with the tag that its request was given."""
    disable_radix_cache: bool = False
    role: Role = Role.UNIFIED
    disaggregation_bootstrap_port: int = 8998
    disaggregation_bootstrap_host: str | None = None
    """None: `host`. `unix:` and a path: a socket in the file system."""
    enable_priority_scheduling: bool = False
    priority_scheduling_preemption_threshold: int = 10
    exit_with_parent: bool = False
    embedding_model_path: Path | None = None
    """A sentence encoder that is served beside the language model."""
    embedding_model_name: str = ""

    @property
    def preemption_threshold(self) -> int | None:
        """None: priorities don't count."""
        return self.priority_scheduling_preemption_threshold if self.enable_priority_scheduling else None


def parse_settings(arguments: Sequence[str]) -> EngineSettings:
    """Settings from a command line; a malformed one ends the process with argparse's own message."""
    parser = argparse.ArgumentParser(prog="python -m backends.local.server", description="The embedded engine.")
    parser.add_argument("--model-path", type=Path, required=True, help="folder in Hugging Face layout")
    parser.add_argument("--served-model-name", help="default: the folder's name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_positive, default=30000)
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument("--kv-cache-bytes", type=_positive, default=GIB, help="size of the page pool")
    pool.add_argument("--max-total-tokens", type=_positive, help="size of the page pool in tokens instead")
    parser.add_argument(
        "--kv-cache-dtype", type=KVPrecision, choices=list(KVPrecision), default=KVPrecision.AUTO,
        help="what a page holds; auto: the model's own type",
    )  # fmt: skip
    for phase in ("prefill", "decode"):
        parser.add_argument(
            f"--{phase}-weights", type=WeightPrecision, choices=list(WeightPrecision), default=WeightPrecision.BF16,
            help=f"what {'prompts are' if phase == 'prefill' else 'produced tokens are'} computed with",
        )  # fmt: skip
    parser.add_argument(
        "--torch-kernels",
        dest="compiled_kernels",
        action="store_false",
        help="don't compile kernels: torch does it all",
    )
    parser.add_argument("--kernel-cache", type=Path, help="folder that keeps compiled kernels")
    parser.add_argument("--page-size", type=_positive, default=16, help="tokens a page")
    parser.add_argument("--max-running-requests", type=_positive, default=32)
    parser.add_argument("--max-queued-requests", type=_positive, default=256)
    parser.add_argument("--chunked-prefill-size", type=_positive, default=512, help="prompt tokens a step")
    parser.add_argument("--context-length", type=_positive, help="default: the checkpoint's own")
    parser.add_argument("--threads", type=_positive, help="default: as many as pay, one per usable core at most")
    parser.add_argument(
        "--page-tags", choices=("on", "off"), default="on", help="check before each step that every page is its user's"
    )
    radix = parser.add_mutually_exclusive_group()
    radix.add_argument("--disable-radix-cache", action="store_true", help="keep no prefixes of earlier requests")
    radix.add_argument(
        "--disaggregation-decode-enable-radix-cache", action="store_true", help="keep them in a decode process, too"
    )
    parser.add_argument(
        *("--role", "--disaggregation-mode"), dest="role", choices=[*Role, "unified"], default=Role.UNIFIED,
        help="which half of a pair this process is; null or unified: both",
    )  # fmt: skip
    parser.add_argument(
        "--disaggregation-bootstrap-port", type=_positive, default=8998, help="where prefill hands over"
    )
    parser.add_argument("--disaggregation-bootstrap-host", help="default: --host; unix:PATH is a socket in a folder")
    parser.add_argument("--enable-priority-scheduling", action="store_true", help="heed the field `priority`")
    parser.add_argument(
        "--priority-scheduling-preemption-threshold",
        type=_positive,
        default=10,
        help="how much more priority takes a running request's pages",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when standard input ends")
    parser.add_argument("--embedding-model-path", type=Path, help="folder of a sentence encoder to serve as well")
    parser.add_argument("--embedding-model-name", help="default: the folder's name")
    given = vars(parser.parse_args(arguments))
    given["page_tags"] = given["page_tags"] == "on"
    given["role"] = Role.UNIFIED if given["role"] == "unified" else Role(given["role"])
    if given["role"] is Role.DECODE and not given["disaggregation_decode_enable_radix_cache"]:
        given["disable_radix_cache"] = True
    del given["disaggregation_decode_enable_radix_cache"]
    given["served_model_name"] = given["served_model_name"] or given["model_path"].name
    encoder = given["embedding_model_path"]
    given["embedding_model_name"] = given["embedding_model_name"] or (encoder.name if encoder else "")
    return EngineSettings(**given)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
