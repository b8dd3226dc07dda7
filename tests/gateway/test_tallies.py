"""What is counted comes out of a scrape as the client library itself would write it."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gateway.tallies import Counts, Timings

BOUNDS = (0.005, 0.1, 1, 30)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


def test_counts_and_durations_are_exposed_as_the_librarys_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts("things", "Things seen.", ("kind",), registry=ours)
    timings = Timings("thing_seconds", "How long.", ("kind", "of"), bounds=BOUNDS, registry=ours)
    counter = Counter("things", "Things seen.", ("kind",), registry=theirs)
    histogram = Histogram("thing_seconds", "How long.", ("kind", "of"), buckets=BOUNDS, registry=theirs)
    for kind, amount in (("a", 1), ("b", 3), ("a", 2)):
        counts.of(kind).add(amount)
        counter.labels(kind).inc(amount)
    for seconds in (0.0, 0.005, 0.0051, 0.7, 1.0, 29.0, 31.0):
        timings.of("a", "x").observe(seconds)
        histogram.labels("a", "x").observe(seconds)
    timings.of("b", "x")
    histogram.labels("b", "x")
    assert lines(ours) == lines(theirs)


def test_two_metrics_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    Counts("things", "Things seen.", ("kind",), registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counts("things", "Things seen.", ("kind",), registry=registry)
