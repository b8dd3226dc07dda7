"""Whose line runs next, and whether an engine is idle enough for one. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from gateway.batches.batch import Batch


def next_turn(ready: Sequence[Batch], running: Mapping[str, int], served: Mapping[str, int]) -> Batch | None:
    """The oldest batch of the account with the fewest lines running; among equals of the one served longest ago.

    ready: oldest first. running: lines by account. served: by account, the count at which it was last served.
    """
    if not ready:
        return None
    accounts = {batch.account_id for batch in ready}
    account = min(accounts, key=lambda one: (running.get(one, 0), served.get(one, -1), one))
    return next(batch for batch in ready if batch.account_id == account)


def has_room(free_shares: Iterable[float], *, waiting: int, idle_share: float) -> bool:
    """May background work begin? Only where nobody waits, and a replica has more than this share of its pages free.

    free_shares: of the pages of each replica that answers.
    """
    return not waiting and any(share > idle_share for share in free_shares)
