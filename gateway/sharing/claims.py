"""What a process claims of a replica, what it is granted, and what becomes of its gate then. Pure.

Used by the sharer and the boards, and by the replay of whole fleets, so that its gateways claim as the service's do.
"""

from dataclasses import dataclass

from gateway.gate import Gate

# Claimed ahead of the peak, of the whole pool: so many requests enter before the next claim. Many processes that each
# did so would leave nothing: all together claim so much ahead at most.
_AHEAD_SHARE = 1 / 32
_ALL_AHEAD_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Ask:
    """least, wanted: as of a Claim. short_of: the gate's when it asked; short: that is more than is granted."""

    least: int
    wanted: int
    short_of: float
    short: bool


def ask_of(gate: Gate, *, processes: int, others_hunger: bool) -> Ask | None:
    """None: what is granted will do, and is not much too much. processes: how many share. others_hunger: another
    waits for pages here, where nobody then keeps what nobody uses.
    """
    short = gate.short_of > gate.granted_tokens
    share = 0.0 if others_hunger and not short else min(_AHEAD_SHARE, _ALL_AHEAD_SHARE / processes)
    ahead = round(gate.total_tokens * share)
    wanted = min(gate.total_tokens, round(max(gate.peak(), gate.short_of)) + ahead)
    if gate.yields:
        wanted = min(wanted, round(gate.granted_tokens))
    kept = wanted + (2 * ahead if len(gate) else 0)
    if not short and not gate.yields and wanted <= gate.granted_tokens <= kept:
        return None
    return Ask(round(gate.resident_tokens), wanted, gate.short_of, short)


def granted(least: int, wanted: int, *, total: int, others: int) -> int:
    """What is in use already in any case; beyond it what the others leave."""
    return max(least, min(wanted, total - others))


def take(gate: Gate, ask: Ask, tokens: int, *, waits: bool) -> bool:
    """So much was granted. waits: whoever is short of it still does. True if somebody may enter now who could not."""
    more = tokens > gate.granted_tokens
    gate.granted_tokens = tokens
    # Somebody may have been refused while the board was asked: that is for the next claim. Who does not wait asks once:
    # else what nobody wants any more would be claimed until there is so much.
    if tokens >= gate.short_of or (not (waits and ask.short) and gate.short_of == ask.short_of):
        gate.short_of = 0.0
    return more
