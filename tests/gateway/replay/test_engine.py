"""The simulated engine: SGLang's rules, pages conserved, and the measured throughputs."""

from dataclasses import replace

import pytest

from gateway.replay.engine import Engine
from gateway.replay.profiles import PROFILES, Profile
from gateway.replay.requests import Fate, SimulatedRequest

BF16 = PROFILES["h200-8b-bf16"]


def request(name: str, prompt: int = 1000, output: int = 100, **more: int) -> SimulatedRequest:
    return SimulatedRequest(name, "t", 0.0, prompt, output, more.get("ceiling", 4096))


def run_to_the_end(engine: Engine) -> None:
    while engine.run(float("inf")) is not None:
        check_pages(engine)


def check_pages(engine: Engine) -> None:
    """Free, private and cached pages make the whole pool, and the phases count the running requests."""
    private = 0
    for sequence in engine._running.values():
        private += -(-(sequence.tail_tokens + engine._step - sequence.start) // engine._page)
    if engine._chunked is not None:
        private += -(-engine._chunked.tail_tokens // engine._page)
    pool = engine.pool
    assert pool.free_pages + private + pool.cached_pages == pool.total_pages
    assert sum(engine._phases) == len(engine._running)
    assert all(count >= 0 for count in engine._phases)
    assert engine._kv_tokens == sum(
        each.request.prompt_tokens + engine.produced(each.request) for each in engine._running.values()
    )


def closed_loop(profile: Profile, clients: int, count: int, prompt: int, output: int) -> tuple[float, Engine]:
    """Output tokens a second of so many clients that each send the next request when the last has ended."""
    engine = Engine(profile)
    requests = [request(str(number), prompt, output, ceiling=output) for number in range(count)]
    coming = iter(requests)
    for _ in range(clients):
        engine.submit(next(coming), engine.clock)
    while (moment := engine.run(float("inf"))) is not None:
        for _ in moment.finished:
            if (following := next(coming, None)) is not None:
                engine.submit(following, engine.clock)
    assert all(each.fate is Fate.FINISHED for each in requests)
    return count * output / engine.clock, engine


@pytest.mark.parametrize(
    ("profile", "clients", "count", "prompt", "output", "measured"),
    [
        ("h200-8b-bf16", 1, 3, 4096, 256, 186.7),
        ("h200-8b-bf16", 8, 32, 4096, 256, 877.2),
        ("h200-8b-bf16", 32, 128, 4096, 256, 1464.6),
        ("h200-8b-bf16", 64, 256, 4096, 256, 1426.7),
        ("h200-8b-bf16", 128, 256, 1024, 1024, 6037.5),
        ("h200-8b-fp8", 32, 128, 4096, 256, 1518.4),
        ("h200-8b-fp8", 64, 256, 4096, 256, 1722.0),
        ("h200-8b-fp8", 128, 256, 1024, 1024, 8769.4),
    ],
)
def test_throughput_is_within_15_percent_of_what_was_measured(  # noqa: PLR0917 - a row of the measured table
    profile: str, clients: int, count: int, prompt: int, output: int, measured: float
) -> None:
    rate, _ = closed_loop(PROFILES[profile], clients, count, prompt, output)
    assert rate == pytest.approx(measured, rel=0.15)


def test_a_full_pool_retracts_as_measured_and_a_larger_one_does_not() -> None:
    _, small = closed_loop(BF16, 128, 256, 1024, 1024)
    _, large = closed_loop(PROFILES["h200-8b-fp8"], 128, 256, 1024, 1024)
    assert small.totals.retractions > 0
    assert large.totals.retractions == 0


def test_without_a_cap_the_engines_own_reserve_keeps_most_waiting() -> None:
    small = replace(BF16, total_tokens=12_288)
    engine = Engine(small)
    for number in range(8):
        engine.submit(request(str(number), 1000, 64), 0.0)
    engine.run(float("inf"))
    assert engine.running_count == 2
    capped = Engine(small)
    for number in range(8):
        capped.submit(request(str(number), 1000, 64, ceiling=64), 0.0)
    capped.run(float("inf"))
    assert capped.running_count == 8


def test_a_long_prompt_goes_in_chunks_and_stops_decoding() -> None:
    engine = Engine(BF16)
    engine.submit(request("short", 100, 50), 0.0)
    engine.run(float("inf"))
    engine.submit(request("long", 20_000, 10), engine.clock)
    steps = engine.totals.steps
    for _ in range(3):
        engine.run(float("inf"))
    assert engine.totals.steps == steps
    assert engine.running_count == 2


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pages_and_tokens_are_conserved_through_chunks_retractions_and_shared_prefixes(page: int) -> None:
    engine = Engine(replace(BF16, total_tokens=12_288, page_tokens=page, clip_tokens=64))
    requests = []
    for number in range(60):
        blocks = (*range(2), 100 + number) if number % 3 else ()
        requests.append(
            SimulatedRequest(f"r{number}", "t", 0.0, 1600 + 37 * number % 900, 30 + 53 * number % 700, 2048, blocks)
        )
        engine.submit(requests[-1], 0.0)
    run_to_the_end(engine)
    assert engine.totals.retractions > 0
    assert all(each.fate is Fate.FINISHED and each.produced == each.output_tokens for each in requests)
    assert engine.totals.decoded_tokens == sum(each.output_tokens for each in requests)
    assert engine.pool.used_tokens == 0
    assert any(each.cached_tokens == 1024 for each in requests)


def test_the_fewest_outputs_are_retracted_first() -> None:
    engine = Engine(replace(BF16, total_tokens=4096, clip_tokens=1))
    engine.submit(request("old", 1000, 1500), 0.0)
    engine.run(float("inf"))
    engine.run(engine.clock + 1.0)
    young = request("young", 1000, 1500)
    engine.submit(young, engine.clock)
    run_to_the_end(engine)
    assert young.retractions > 0
    assert young.produced == 1500


def test_the_ratio_falls_with_steps_and_starts_anew_when_idle() -> None:
    engine = Engine(BF16)
    engine.submit(request("a", 100, 700), 0.0)
    run_to_the_end(engine)
    assert engine.new_token_ratio == pytest.approx(0.7 * 0.14)
    engine.submit(request("b"), engine.clock)
    assert engine.new_token_ratio == pytest.approx(0.7)


def test_nothing_to_do_is_nothing_done() -> None:
    engine = Engine(BF16)
    assert engine.run(float("inf")) is None
    engine.submit(request("a"), 5.0)
    assert engine.clock == 5.0
    assert engine.run(4.0) is None
