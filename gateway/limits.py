"""What the settings come to, in the words of each decision: of the queue, of placing, of a gate, of a replica's health.

Used by model_fleet.py. Pure: settings and what an engine says in, limits out.
"""

from gateway.fairness import QueueBounds
from gateway.gate import GateLimits
from gateway.health import HealthLimits
from gateway.placing import PlacingLimits
from gateway.replica import Replica
from gateway.settings import GatewaySettings


def queue_bounds(settings: GatewaySettings) -> QueueBounds:
    return QueueBounds(
        entries_max=settings.queue_entries_max,
        tokens_max=settings.queue_tokens_max,
        tenant_entries_max=min(settings.queue_tenant_entries_max, settings.queue_entries_max),
        tenant_tokens_max=settings.queue_tokens_max // 2,
    )


def placing_limits(settings: GatewaySettings) -> PlacingLimits:
    return PlacingLimits(
        overflow_share=settings.overflow_share,
        margin_z=settings.margin_deviations,
        outputs_ahead=settings.hold_outputs_ahead,
        affinity_s_max=settings.affinity_seconds_max,
        trust_regrowth_s=settings.trust_regrowth_seconds,
    )


def gate_limits(settings: GatewaySettings, replica: Replica, *, running_max: int) -> GateLimits:
    """running_max: as the replica's engine says."""
    return GateLimits(
        prefill_chunk_tokens=settings.prefill_tokens_ahead_max,
        running_max=running_max,
        engine_clip_tokens=max(settings.engine_reserved_tokens, replica.reserved_tokens),
        overflow_share=settings.overflow_share,
        margin_z=settings.margin_deviations,
        unified=not replica.prefills,
    )


def health_limits(settings: GatewaySettings) -> HealthLimits:
    failed = settings.poll_failures_max
    return HealthLimits(
        probes_failed_max=failed,
        probes_seen=failed + 2,
        faults_max=settings.replica_faults_max,
        stalled_s=settings.replica_stalled_seconds_max,
    )
