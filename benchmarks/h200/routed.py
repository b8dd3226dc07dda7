"""Requests through the gateway's own calls, as the service makes them: to one of several replicas, or to a pair.

Admission, money and the HTTP of the service are left out: they are measured elsewhere, and would be what limits at some
thousand chunks a second. Least busy first, as the gate does with free pages.
"""

import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from backends.client import EngineClient
from backends.connections import EngineSession
from backends.settings import BackendSettings
from benchmarks.h200.load import Record
from gateway.engine_call import EngineCall, engine_body
from gateway.pair_call import PairCall
from gateway.replica import Replica
from gateway.request import Endpoint, GenerationRequest
from tenancy.principal import Principal

_SAMPLING = {"temperature": 0, "ignore_eos": True}
_STOP_S = 5.0
_NOBODY = Principal("0" * 32, "benchmark", frozenset(), None, None)


class Routed:
    """targets: fields of load.Target. model: as the engines call it."""

    def __init__(self, session: EngineSession, targets: list[dict[str, Any]], model: str) -> None:
        settings = BackendSettings()
        self._model = model
        self._busy: Counter[str] = Counter()
        self._replicas = []
        for number, target in enumerate(targets):
            name = f"r{number}"
            prefills: tuple[Replica, ...] = ()
            if target["prefill"] is not None:
                client = EngineClient(target["prefill"], session, settings)
                prefills = (Replica(f"{name}-prefill", client, bootstrap=("127.0.0.1", target["bootstrap"])),)
            self._replicas.append(Replica(name, EngineClient(target["url"], session, settings), prefills=prefills))

    async def tokens(self, record: Record, prompt: list[int], tokens: int, number: int) -> AsyncIterator[int]:
        del number
        replica = min(self._replicas, key=lambda one: self._busy[one.id])
        self._busy[replica.id] += 1
        call = self._call(replica, prompt, tokens)
        try:
            await call.open()
            while True:
                try:
                    await call.next_body()
                except StopAsyncIteration:
                    break
                if call.usage is not None:
                    yield call.usage.completion
        except Exception:
            await call.stop(wait_s=_STOP_S)
            raise
        finally:
            record.wasted = call.wasted_prefill_tokens
            call.close()
            self._busy[replica.id] -= 1

    def _call(self, replica: Replica, prompt: list[int], tokens: int) -> EngineCall:
        request = GenerationRequest(
            id=str(uuid.uuid4()),
            principal=_NOBODY,
            model=self._model,
            endpoint=Endpoint.COMPLETIONS,
            route="benchmark",
            messages=None,
            prompt=tuple(prompt),
            sampling=_SAMPLING,
            max_tokens=tokens,
            n=1,
            stream=True,
            reject_if_busy=False,
            received_at_ns=0,
            deadline_s=0.0,
        )
        body = engine_body(request, prompt, tokens, 0, stream=True, cache_salt="")
        if not replica.prefills:
            return EngineCall(request, replica, 0, body)
        return PairCall(request, replica.prefills[0], replica, 0, body, prompt_done=lambda: None)
