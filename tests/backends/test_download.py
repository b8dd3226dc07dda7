import errno
import os
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import pytest

from backends.download import DownloadError, download
from tests.backends.range_server import FileServer, closed_port, serve_file

CONTENT = bytes(range(256)) * 4096


def fetch(
    url: str, part: Path, *, size: int = len(CONTENT), progress: Callable[[int, int], None] | None = None
) -> None:
    download(url, part, size=size, progress=progress or (lambda here, total: None), pause=lambda seconds: None)


def test_resumes_where_a_cut_connection_stopped(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    with serve_file(FileServer(CONTENT, cuts=[300_000, 100_000])) as server:
        fetch(server.url, part)
    assert part.read_bytes() == CONTENT
    assert server.ranges_asked == [None, "bytes=300000-", "bytes=400000-"]


def test_resumes_what_an_earlier_process_left(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    part.write_bytes(CONTENT[:1000])
    seen: list[int] = []
    with serve_file(FileServer(CONTENT)) as server:
        fetch(server.url, part, progress=lambda here, total: seen.append(here))
    assert part.read_bytes() == CONTENT
    assert server.ranges_asked == ["bytes=1000-"]
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)


def test_begins_again_where_the_server_knows_no_ranges(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    part.write_bytes(b"x" * 1000)
    with serve_file(FileServer(CONTENT, honours_ranges=False)) as server:
        fetch(server.url, part)
    assert part.read_bytes() == CONTENT


def test_begins_again_when_the_part_is_longer_than_the_file(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    part.write_bytes(b"x" * (len(CONTENT) + 5))
    with serve_file(FileServer(CONTENT)) as server:
        fetch(server.url, part)
    assert part.read_bytes() == CONTENT


def test_gives_up_on_a_line_that_brings_nothing_and_keeps_the_part(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    part.write_bytes(CONTENT[:10])
    with pytest.raises(DownloadError, match="refused"):
        fetch(f"http://127.0.0.1:{closed_port()}/file", part)
    assert part.read_bytes() == CONTENT[:10]


def test_a_missing_file_is_not_asked_for_twice(tmp_path: Path) -> None:
    with (
        serve_file(FileServer(CONTENT, status=HTTPStatus.NOT_FOUND)) as server,
        pytest.raises(DownloadError, match="404"),
    ):
        fetch(server.url, tmp_path / "file.part")
    assert len(server.ranges_asked) == 1


def test_a_failing_server_is_asked_a_bounded_number_of_times(tmp_path: Path) -> None:
    failing = FileServer(CONTENT, status=HTTPStatus.BAD_GATEWAY)
    with serve_file(failing) as server, pytest.raises(DownloadError, match="502"):
        fetch(server.url, tmp_path / "file.part")
    assert len(server.ranges_asked) == 4


def test_takes_at_most_one_byte_more_than_expected(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    with serve_file(FileServer(CONTENT)) as server:
        fetch(server.url, part, size=1000)
    assert part.stat().st_size == 1001


def test_reads_file_urls(tmp_path: Path) -> None:
    source = tmp_path / "a b.whl"
    source.write_bytes(CONTENT)
    fetch(source.as_uri(), tmp_path / "file.part")
    assert (tmp_path / "file.part").read_bytes() == CONTENT


def test_refuses_other_schemes(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="ftp"):
        fetch("ftp://127.0.0.1/file", tmp_path / "file.part")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the always-full device is Linux's")
def test_a_full_disk_is_not_taken_for_a_bad_line(tmp_path: Path) -> None:
    part = tmp_path / "file.part"
    part.symlink_to("/dev/full")
    with serve_file(FileServer(CONTENT)) as server, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        fetch(server.url, part)
    assert len(server.ranges_asked) == 1
