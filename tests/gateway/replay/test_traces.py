"""Reading public traces, plain and gzip, and laying load and tenants over them."""

import gzip
from collections import Counter
from pathlib import Path

import pytest

from gateway.replay.profiles import PROFILES
from gateway.replay.traces import Load, TraceInvalid, TraceRow, arrange, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
"""
AZURE_WITH_ZONE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,110,27
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1024, "output_length": 90, "hash_ids": [0, 3]}
"""
PROFILE = PROFILES["h200-8b-bf16"]


@pytest.mark.parametrize("packed", [False, True])
def test_azures_csv_is_read(tmp_path: Path, *, packed: bool) -> None:
    path = written(tmp_path, "trace.csv", AZURE, packed=packed)
    assert read_trace(path) == [TraceRow(0.0, 4808, 10), TraceRow(0.5, 3180, 8)]


def test_azures_times_with_a_zone_are_read(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, "trace.csv", AZURE_WITH_ZONE)) == [TraceRow(0.0, 110, 27)]


@pytest.mark.parametrize("packed", [False, True])
def test_mooncakes_lines_are_read_and_a_partial_last_block_is_left_out(tmp_path: Path, *, packed: bool) -> None:
    path = written(tmp_path, "trace.jsonl", MOONCAKE, packed=packed)
    assert read_trace(path) == [TraceRow(0.0, 1100, 500, (0, 1)), TraceRow(1.5, 1024, 90, (0, 3))]


@pytest.mark.parametrize("text", ["", "hello\nworld\n", '{"timestamp": 1}\n', AZURE.splitlines()[0] + "\n"])
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceInvalid, match="trace"):
        read_trace(written(tmp_path, "trace.csv", text))


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": 1, "input_length": -5, "output_length": 1}',
        '{"timestamp": 1, "input_length": 5, "output_length": -1}',
        '{"timestamp": NaN, "input_length": 5, "output_length": 1}',
    ],
)
def test_a_request_of_which_nothing_can_be_played_is_named(tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 1}'
    with pytest.raises(TraceInvalid, match="in its request 2"):
        read_trace(written(tmp_path, "trace.jsonl", f"{good}\n{line}\n"))


def test_a_missing_file_and_a_broken_archive_are_said_clearly(tmp_path: Path) -> None:
    with pytest.raises(TraceInvalid, match="can't be read"):
        read_trace(tmp_path / "nothing.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(TraceInvalid, match="can't be read"):
        read_trace(broken)


def rows(count: int = 400) -> list[TraceRow]:
    return [TraceRow(float(number), 100, 10) for number in range(count)]


def test_a_factor_brings_arrivals_closer_together() -> None:
    assert arrange(rows(), Load(factor=4.0), PROFILE)[-1].arrived_at == pytest.approx(399 / 4)


def test_tenants_are_skewed_and_the_same_for_the_same_seed() -> None:
    requests = arrange(rows(), Load(tenants=5, skew=1.5, seed=3), PROFILE)
    counts = Counter(request.tenant for request in requests)
    assert counts["tenant-0"] > 2 * counts["tenant-3"]
    again = arrange(rows(), Load(tenants=5, skew=1.5, seed=3), PROFILE)
    other = arrange(rows(), Load(tenants=5, skew=1.5, seed=4), PROFILE)
    assert [request.tenant for request in requests] == [request.tenant for request in again]
    assert [request.tenant for request in requests] != [request.tenant for request in other]


def test_a_greedy_tenant_sends_copies_and_the_others_stay_as_they_are() -> None:
    plain = Counter(request.tenant for request in arrange(rows(), Load(tenants=4), PROFILE))
    greedy = Counter(request.tenant for request in arrange(rows(), Load(tenants=4, greedy=9), PROFILE))
    assert greedy["tenant-0"] == 10 * plain["tenant-0"]
    assert greedy["tenant-2"] == plain["tenant-2"]


def test_what_can_never_fit_is_left_out_and_outputs_end_at_their_ceiling() -> None:
    requests = arrange([TraceRow(0.0, 200_000, 10), TraceRow(1.0, 100, 1 << 20)], Load(), PROFILE)
    assert [request.output_tokens for request in requests] == [PROFILE.output_tokens_max]


def written(folder: Path, name: str, text: str, *, packed: bool = False) -> Path:
    path = folder / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path
