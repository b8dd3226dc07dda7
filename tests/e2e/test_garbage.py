"""A request's objects die with it, by their reference counts. In service the collector of cycles is called rarely
(api/serving.py): until it came, prompts would stay in memory, and each request would be given memory that is cold.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api.departure import ClientWatch
from api.middleware import BoundedBody
from gateway.engine_call import EngineCall
from gateway.request import GenerationRequest
from gateway.run import Run
from gateway.stream import Stream
from gateway.want import Want
from tests.doubles.waiting import eventually_async
from tests.e2e.dialects import CHAT, RUN, Dialect
from tests.e2e.service import SETTLE_S_MAX, Service
from tests.e2e.test_disconnects import leave_after

# No cycle of a request's is without one of these.
OF_REQUESTS = (RequestResponseCycle, BoundedBody, ClientWatch, GenerationRequest, Run, Want, EngineCall, Stream)
# Whole, streamed, of several choices, whole but read as a stream, and refused.
ASKED: list[dict[str, Any]] = [{}, {"stream": True}, {"stream": True, "n": 2}, {"max_tokens": 2000}, {"temperature": 9}]


@contextmanager
def left_to_the_collector() -> Iterator[Counter[str]]:
    """Counts, once the block has ended, which objects of requests nothing but the collector of cycles found."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage if issubclass(type(each), OF_REQUESTS))
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
