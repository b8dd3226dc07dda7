"""A request's objects die with it, by their reference counts. In service the collector of cycles is called rarely
(api/serving.py): until it came, prompts would stay in memory, and each request would be given memory that is cold.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.doubles.waiting import eventually_async
from tests.e2e.dialects import CHAT, RUN, Dialect
from tests.e2e.service import SETTLE_S_MAX, Service
from tests.e2e.test_disconnects import leave_after

OURS = ("api.", "gateway.", "billing.", "tenancy.", "backends.", "uvicorn.")
# Whole, streamed, of several choices, whole but read as a stream, and refused.
ASKED: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, "n": 2}, {"max_tokens": 2000}, {"temperature": 9}]


@contextmanager
def left_to_the_collector() -> Iterator[Counter[str]]:
    """Counts, once the block has ended, which of our objects nothing but the collector of cycles found."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)
        found.update(kind for kind in kinds if kind.startswith(OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_requests_leave_nothing_to_the_collector_of_cycles(service: Service) -> None:
    for dialect in (CHAT, RUN):  # whatever is made once
        await ask_in_all_ways(service, dialect)
    with left_to_the_collector() as found:
        for dialect in (CHAT, RUN):
            await ask_in_all_ways(service, dialect)
        await eventually_async(service.is_clean, within_s=SETTLE_S_MAX, what="a clean service")
    assert not found


async def ask_in_all_ways(service: Service, dialect: Dialect) -> None:
    for fields in ASKED:
        await service.post(dialect.path(service), dialect.body(service, **fields))
    service.engine.steer(itl_ms=20)
    await leave_after(service, dialect, 1, max_tokens=60)
    service.engine.steer(itl_ms=0)
