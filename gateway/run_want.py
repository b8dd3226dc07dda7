"""What a run asks of the fleet: its size, its class's promises, and how to know it and its prompt again.

Called by pipeline.py. Whatever costs time for a long prompt (its digest) is worked out only where somebody asks.
"""

import math
from array import array
from hashlib import blake2b
from weakref import ref

from billing.price_book import Tier
from gateway.prefixes import block_ids
from gateway.request import GenerationRequest
from gateway.rollouts.split import conversation_of
from gateway.run import Run
from gateway.settings import GatewaySettings, TierSettings
from gateway.want import Want
from tenancy.values import value

_AS_ALL = TierSettings()


@value
class _Digest:
    """Of the prompt and what shapes its answer: a client that comes again sends the same."""

    prompt_ids: list[int]

    def __call__(self) -> bytes:
        return blake2b(array("I", self.prompt_ids).tobytes(), digest_size=16).digest()


@value
class _Produced:
    """Outputs of each choice by now. It does not keep the run, which keeps it: runs die by their reference counts."""

    run: ref[Run]

    def __call__(self) -> int:
        run = self.run()
        return 0 if run is None else run.produced_each()


def want_of(run: Run, settings: GatewaySettings) -> Want:
    request = run.request
    tier = settings.tiers.get(request.principal.tier, _AS_ALL)
    first_s_max = tier.first_token_seconds_max or settings.first_token_seconds_max
    between_ms_max = tier.between_tokens_ms_max or settings.between_tokens_ms_max
    split = run.fleet.split
    salt = f"{request.principal.account_id}\0{request.model}".encode()
    return Want(
        request_id=request.id,
        tenant=request.principal.account_id,
        endpoint=request.route,
        prompt_tokens=len(run.prompt_ids),
        choices=request.n,
        cap_tokens=run.cap.tokens,
        session=request.session,
        # Before all others of its account's tier, as its price says.
        tier=request.principal.tier - (run.price.tier == Tier.PRIORITY),
        weight=request.principal.weight_percent / 100,
        blocks=block_ids(run.prompt_ids, salt),
        first_s_max=math.inf if first_s_max is None else first_s_max,
        between_s_max=math.inf if between_ms_max is None else between_ms_max / 1000,
        heard=request.stream or run.cap.tokens * request.n > settings.hold_outputs_ahead,
        produced=_Produced(ref(run)),
        digest=_Digest(run.prompt_ids),
        regions=request.principal.regions,
        revision="" if split is None else split.revision_of(conversation_of(request)),
        elsewhere=split is None or split.elsewhere,
    )


def wait_s_max(request: GenerationRequest, settings: GatewaySettings) -> float:
    """How long it may wait for pages: its tier's bound, or everybody's."""
    return settings.tiers.get(request.principal.tier, _AS_ALL).queue_wait_seconds_max or settings.queue_wait_seconds_max
