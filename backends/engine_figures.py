"""What an engine's `GET /metrics` says beyond its load report: evictable cache, retractions, page tags.

The fleet reads it for the operator's eye (`/console/v1/capacity`, the live page), and to know that an engine took pages
back. Names are SGLang's and the page-tag plugin's, which the local engine shares.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from backends.errors import EngineBroke
from backends.page_tags import ACTIVE_METRIC

_WANTED: Final = {
    "sglang:kv_evictable_tokens": "evictable_tokens",
    "sglang:num_retracted_reqs": "retracted_waiting",
    "sglang:num_retracted_requests_total": "retractions",
    ACTIVE_METRIC: "tags_active",
    "pagegate:page_tags_pairs_checked_total": "pages_checked",
    "pagegate:page_tags_requests_aborted_total": "tag_aborts",
    "pagegate:page_tags_pages_quarantined": "pages_quarantined",
}
# Ranks of one model copy say the same of one pool: the first speaks for all. Only data-parallel ranks have their own.
_COPIES: Final = ("tp_rank", "pp_rank", "moe_ep_rank")


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """None: the engine does not say. evictable_tokens: of cache that nobody uses and that gives way to requests.

    retracted_waiting: requests whose pages were taken back and that wait to be computed again. retractions: how often
    that happened since the engine started. tags_active: whether pages are guarded by tags; pages_checked, tag_aborts
    (requests stopped because of a foreign page) and pages_quarantined are of the whole engine.
    """

    evictable_tokens: int | None = None
    retracted_waiting: int | None = None
    retractions: int | None = None
    tags_active: int | None = None
    pages_checked: int | None = None
    tag_aborts: int | None = None
    pages_quarantined: int | None = None


def read_figures(text: str, rank: int | None = None) -> EngineFigures:
    """rank: of data parallelism, whose own lines count. Raises EngineBroke if the text is not Prometheus's."""
    found: dict[str, int] = {}
    try:
        for name, labels, value in _samples(text):
            told = labels.get("dp_rank", "")
            if any(labels.get(copy, "0") != "0" for copy in _COPIES) or (
                rank is not None and told not in ("", str(rank))
            ):
                continue
            found[_WANTED[name]] = found.get(_WANTED[name], 0) + int(value)
    except (ValueError, OverflowError) as error:
        raise EngineBroke("the engine's metrics can't be read") from error
    return EngineFigures(**found)


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Of the wanted names alone: an engine has hundreds of lines, and the library's parser takes its time."""
    lines = (line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _WANTED)
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value
