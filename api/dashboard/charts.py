"""A chart's data as the page carries it for static/charts.js: integers, labels, and how to write the axis. Pure."""

from collections.abc import Mapping
from typing import Any

from billing.dashboard.explorer import Band, Exploration, Measure, cumulative

OTHERS = "Other"
ALL = "All"
# The group of what has no tag, or no end user.
NOBODY = "(none)"


def chart_of(
    found: Exploration, measure: Measure, step_ns: int, names: Mapping[str, str], *, running: bool
) -> dict[str, Any]:
    """steps: Unix seconds at which each begins. bands: from the bottom up. running: sums up to each step."""
    return {
        "unit": measure.value,
        "step_s": step_ns // 1_000_000_000,
        "running": running,
        "lines": found.overlapping,  # what overlaps is not stacked
        "steps": [start_ns // 1_000_000_000 for start_ns in found.steps_ns],
        "bands": [
            {
                "name": band_name(band, found, names),
                "values": list(cumulative(band.values) if running else band.values),
            }
            for band in found.bands
        ],
    }


def band_name(band: Band, found: Exploration, names: Mapping[str, str]) -> str:
    if band.key == "":
        return NOBODY
    if band.key is not None:
        return names.get(band.key, band.key)
    return f"{OTHERS} ({found.others})" if len(found.bands) > 1 else ALL
