"""What workers hold is added up; what is the same for all is said once."""

from typing import Any

from api.console.together import capacity_together, held_together


def _model(held: int, waiting: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    replica = {"id": "a", "held_pages": held, "live_requests": 1, "ghost_requests": 0, "standing": "healthy"}
    model = {"model": "m", "waiting_for_pages": len(waiting), "kept_places": 0, "admitted": 5, "engine_queued": 1}
    return model | {"waiting": waiting, "up": True, "replicas": [replica]} | fields


def _row(account: str, waits_ms: int, *, tier: int = 0) -> dict[str, Any]:
    row = {"account_id": account, "tier": tier, "weight_percent": 100, "requests": 1, "prompt_tokens": 10}
    return row | {"first_waits_ms": waits_ms, "served_s": waits_ms / 1000}


def test_pages_queues_and_counts_are_sums() -> None:
    ours = {"models": [_model(7, [_row("x", 10), _row("y", 5, tier=1)])]}
    theirs = {"models": [_model(3, [_row("x", 40), _row("z", 1)]), _model(1, [], model="unknown here")]}
    (model,) = capacity_together(ours, [theirs, theirs])["models"]
    assert (model["waiting_for_pages"], model["admitted"], model["engine_queued"], model["up"]) == (6, 15, 3, True)
    assert [(replica["held_pages"], replica["standing"]) for replica in model["replicas"]] == [(13, "healthy")]
    rows = [(row["account_id"], row["requests"], row["first_waits_ms"], row["served_s"]) for row in model["waiting"]]
    assert rows == [("x", 3, 40, 0.04), ("z", 2, 1, 0.001), ("y", 1, 5, 0.005)]


def test_alone_it_is_what_it_was() -> None:
    ours = {"models": [_model(7, [_row("x", 10)])]}
    assert capacity_together(ours, []) == ours


def test_what_is_held_is_added_name_by_name() -> None:
    assert held_together([{"a": 1, "b": 2}, {"a": 3, "b": 0}]) == {"a": 4, "b": 2}
