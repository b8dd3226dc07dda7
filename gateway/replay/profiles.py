"""What the simulated engine can do: capacity, and how long a step takes. Used by engine.py and the command line.

Step times are fitted to one measured run: one H200, SGLang 0.5.17, the shape of Llama 3.1 8B with weights in bf16,
flash attention 3. Decode: 4.97 ms alone at 4k of context; 9.16 ms for 32 streams of 4k and 9.66 ms for about 95 of 1.5k
(KV in bf16); 8.8, 12.6 and 11.6 ms for 32 and 64 streams of 4k and 128 of 1.5k (KV in fp8). Prefill: 40,405 tokens/s
over prompts of 4,096. The part of prefill that grows with context was not measured: it is attention's arithmetic at
the same 650 TFLOP/s, and taken out of the measured rate.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds: a decode step is its base + streams × per_stream + KV tokens read × per_kv_token.

    A prefill batch is its base + tokens × per_prefill_token + what they attend to × per_attended.
    """

    decode_base: float
    per_stream: float
    per_kv_token: float
    prefill_base: float
    per_prefill_token: float
    per_attended: float

    def decode(self, streams: int, kv_tokens: int) -> float:
        return self.decode_base + streams * self.per_stream + kv_tokens * self.per_kv_token

    def prefill(self, tokens: int, attended: float) -> float:
        """attended: each token × its context, summed over the batch."""
        return self.prefill_base + tokens * self.per_prefill_token + attended * self.per_attended


@dataclass(frozen=True, slots=True)
class Profile:
    """One replica. clip_tokens and conservativeness are the engine's launch settings, here SGLang's defaults."""

    name: str
    total_tokens: int
    page_tokens: int
    steps: StepTimes
    running_max: int = 1024
    chunk_tokens: int = 8192
    clip_tokens: int = 4096
    conservativeness: float = 1.0
    context_tokens: int = 131072
    output_tokens_max: int = 4096


_BF16_KV = StepTimes(4.84e-3, 6.0e-6, 3.0e-8, 4.0e-3, 2.29e-5, 8.7e-10)
_FP8_KV = StepTimes(5.0e-3, 1.25e-5, 2.54e-8, 4.0e-3, 2.22e-5, 8.7e-10)
# The seeds' capacities belong to a larger model on more GPUs. Its step times were not measured: the 8B ones stand in.
_PROFILES = (
    Profile("h200-8b-bf16", 144_348, 1, _BF16_KV),
    Profile("h200-8b-fp8", 288_697, 1, _FP8_KV),
    Profile("h200-8b-fp8-page64", 288_640, 64, replace(_FP8_KV, per_stream=0.5e-6, per_kv_token=2.1e-8)),
    Profile("k2-bf16", 686_016, 64, _BF16_KV),
    Profile("k2-fp8", 1_370_048, 64, _FP8_KV),
)
PROFILES: dict[str, Profile] = {profile.name: profile for profile in _PROFILES}


@dataclass(frozen=True, slots=True)
class FleetProfile:
    """Many replicas of one profile. gateways: as many of each region; delay_s: how old their reports are.

    claim_s: how long a claim at the board that the gateways of a region share takes, there and back; None: there is no
    board. load: the part of all pages that arrivals would fill. decisions: so many are measured, after the fleet has
    filled.
    """

    replicas: int
    regions: int
    gateways: int
    delay_s: float = 0.2
    claim_s: float | None = 0.001
    load: float = 0.9
    decisions: int = 10_000


_FLEETS = (FleetProfile(1, 1, 1), FleetProfile(10, 1, 2), FleetProfile(100, 4, 8), FleetProfile(1000, 4, 64))
FLEETS: dict[int, FleetProfile] = {fleet.replicas: fleet for fleet in _FLEETS}
