"""What the workers of one gateway hold and wait for, added up. Pure; used by operations.py.

Engines, their reports and the speed of a model are the same for all, so the asked worker's word stands for those.
"""

from collections.abc import Iterable
from typing import Any, Final

_SUMMED: Final = ("waiting_for_pages", "kept_places", "admitted", "engine_queued")
_HELD: Final = ("held_pages", "live_requests", "ghost_requests")


def held_together(all_held: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sums, name by name."""
    total: dict[str, int] = {}
    for held in all_held:
        for name, figure in held.items():
            total[name] = total.get(name, 0) + figure
    return total


def capacity_together(asked: dict[str, Any], others: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The asked worker's capacity with what the others hold added; what it does not know is left out."""
    models = asked["models"]
    for other in others:
        theirs = {model["model"]: model for model in other["models"]}
        models = [_model(ours, theirs[ours["model"]]) if ours["model"] in theirs else ours for ours in models]
    return {**asked, "models": models}


def _model(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    held = {replica["id"]: replica for replica in theirs["replicas"]}
    return {
        **ours,
        **{name: ours[name] + theirs[name] for name in _SUMMED},
        "waiting": _waiting(ours["waiting"], theirs["waiting"]),
        "replicas": [
            {**replica, **{name: replica[name] + held[replica["id"]][name] for name in _HELD}}
            if replica["id"] in held
            else replica
            for replica in ours["replicas"]
        ],
    }


def _waiting(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An account that waits at both is one row: its first request is the one that has waited longest."""
    rows = {(row["tier"], row["account_id"]): row for row in ours}
    for row in theirs:
        mine = rows.get((row["tier"], row["account_id"]))
        rows[row["tier"], row["account_id"]] = (
            row
            if mine is None
            else {
                **mine,
                "requests": mine["requests"] + row["requests"],
                "prompt_tokens": mine["prompt_tokens"] + row["prompt_tokens"],
                "first_waits_ms": max(mine["first_waits_ms"], row["first_waits_ms"]),
                "served_s": max(mine["served_s"], row["served_s"]),
            }
        )
    return [rows[key] for key in sorted(rows)]
