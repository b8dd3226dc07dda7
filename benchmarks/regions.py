"""How much later a first token comes from another region: three regions as network namespaces, real engines and stores.

    .venv/bin/python -m benchmarks.regions [--rounds 500]      as root

Requests to the first region's gateway are served at home and, with home drained, by the nearest other region, in turn.
The goal is the round trip and 10 ms at the 95th percentile. Beside the percentiles of both stand those of what
neighbours differ by: what else the machine does takes less part in them.
"""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

from tests.e2e.regions import REGIONS, ROUND_TRIPS_S, first_tokens_s, three_regions
from tests.engines import build_tiny_checkpoint
from tests.stores import PostgresServer, ValkeyServer

_GOAL_S = 0.010


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres, ValkeyServer() as valkey:
        checkpoint = build_tiny_checkpoint(Path(folder) / "tiny")
        asyncio.run(_measure(Path(folder), checkpoint, postgres, valkey, rounds))


async def _measure(folder: Path, checkpoint: Path, postgres: PostgresServer, valkey: ValkeyServer, rounds: int) -> None:
    async with three_regions(folder, checkpoint, postgres, valkey) as world:
        await first_tokens_s(world.regions[0], "r0", 5)
        home, elsewhere = await first_tokens_s(world.regions[0], "r0", rounds)
    round_trip_s = ROUND_TRIPS_S[0][1]
    print(f"from {REGIONS[0]} to {REGIONS[1]}, {round_trip_s * 1000:.0f} ms there and back, {rounds} rounds")
    for share in (50, 95):
        near, far = (statistics.quantiles(times, n=100)[share - 1] for times in (home, elsewhere))
        added = far - near
        print(
            f"p{share}   home {near * 1000:7.1f} ms   elsewhere {far * 1000:7.1f} ms   added {added * 1000:6.1f} ms, "
            f"{(added - round_trip_s) * 1000:+.1f} ms beside the round trip"
        )
    beyond = [far - near - round_trip_s for near, far in zip(home, elsewhere, strict=True)]
    middle, most = (statistics.quantiles(beyond, n=100)[share - 1] for share in (50, 95))
    within = sum(each <= _GOAL_S for each in beyond) / len(beyond)
    print(
        f"each beside the one before it: p50 {middle * 1000:+.1f} ms, p95 {most * 1000:+.1f} ms beside the round trip; "
        f"{within:.1%} within {_GOAL_S * 1000:.0f} ms"
    )


if __name__ == "__main__":
    main()
