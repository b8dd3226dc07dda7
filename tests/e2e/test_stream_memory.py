"""Short streams leave nothing of themselves behind in the gateway's process, a third of them left early."""

from pathlib import Path

import pytest

from benchmarks.stream_memory import Sample, served

STREAMS = 2_400
# What a stream that is kept would weigh at least, over the streams that are measured.
STREAM_BYTES = 16 << 10


@pytest.mark.load
@pytest.mark.timeout(300)  # ten seconds on a quiet machine
async def test_thousands_of_short_streams_are_not_kept(tmp_path: Path) -> None:
    samples: list[Sample] = []
    await served(tmp_path, STREAMS, every=STREAMS // 4, say=samples.append)
    # Databases' caches and the allocator's arenas go on filling for a while, most of it in the first quarter.
    warm, last = samples[1].rss, samples[-1].rss
    assert samples[-1].streams == STREAMS
    assert last - warm < STREAM_BYTES * STREAMS * 3 // 4, [sample.rss >> 20 for sample in samples]
