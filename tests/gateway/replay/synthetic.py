"""A small seeded trace for tests: bursts of prompts with exponential sizes, some behind shared prefixes."""

import random

from gateway.replay.traces import TraceRow


def synthetic_rows(count: int = 300, *, rate: float = 4.0, seed: int = 1, shared: bool = False) -> list[TraceRow]:
    draw, at_s, rows = random.Random(seed), 0.0, []
    for number in range(count):
        at_s += draw.expovariate(rate)
        prompt = min(20_000, 20 + int(draw.expovariate(1 / 2500)))
        output = max(1, min(1500, int(draw.expovariate(1 / 120))))
        blocks: tuple[int, ...] = ()
        if shared:
            full = prompt // 512
            blocks = tuple(range(min(full, 3))) + tuple(1000 * (number + 1) + depth for depth in range(full - 3))
        rows.append(TraceRow(at_s, prompt, output, blocks))
    return rows
