"""The spool: what was committed is read back once, whatever is cut, flipped, full or killed."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.errors import BillingUnavailable
from billing.frames import encode
from billing.spool import Position, Spool, SpoolInUse
from tests.examples import examples

OpenSpool = Callable[..., Spool]


@pytest.fixture
def open_spool(tmp_path: Path) -> Iterator[OpenSpool]:
    opened: list[Spool] = []

    def open_it(**options: int) -> Spool:
        opened.append(Spool(tmp_path / "spool", **options))
        return opened[-1]

    yield open_it
    for spool in opened:
        spool.close()


def _records(spool: Spool, position: int | None = None) -> list[bytes]:
    start = spool.checkpoint if position is None else position
    return [record for record, _ in spool.read(start, spool.end)]


def _segments(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "spool").glob("*.spool"))


def test_a_folder_keeps_its_owners_name(tmp_path: Path) -> None:
    names = []
    for folder in ("one", "one", "other"):
        spool = Spool(tmp_path / folder)
        names.append(spool.owner)
        spool.close()
    assert names[0] == names[1] != names[2]
    assert len(names[0]) == 32


def _owner_of(folder: Path) -> str:
    spool = Spool(folder)
    owner = spool.owner
    spool.close()
    return owner


def test_a_copy_of_a_folder_has_an_owner_of_its_own(tmp_path: Path) -> None:
    owner = _owner_of(tmp_path / "spool")
    shutil.copytree(tmp_path / "spool", tmp_path / "copy")
    copied = _owner_of(tmp_path / "copy")
    assert copied != owner
    assert _owner_of(tmp_path / "copy") == copied
    (tmp_path / "spool").rename(tmp_path / "moved")
    assert _owner_of(tmp_path / "moved") == owner


def test_an_owner_of_the_version_before_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "lock").write_text("0123456789abcdef" * 2)
    assert _owner_of(tmp_path / "spool") == "0123456789abcdef" * 2
    shutil.copytree(tmp_path / "spool", tmp_path / "copy")
    assert _owner_of(tmp_path / "copy") != "0123456789abcdef" * 2


class TestAppendAndRead:
    async def test_records_come_back_in_order_after_a_restart(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        records = [f"record {number}".encode() for number in range(100)]
        for record in records:
            position = spool.append(record)
        await spool.commit(position)
        assert _records(spool) == records
        spool.close()
        assert _records(open_spool()) == records

    async def test_positions_name_what_is_behind_them(self, open_spool: OpenSpool) -> None:
        spool = open_spool(segment_bytes_max=64)
        positions = [spool.end, *(spool.append(b"%d" % number) for number in range(20))]
        for number, position in enumerate(positions):
            assert _records(spool, position) == [b"%d" % later for later in range(number, 20)]

    async def test_segments_rotate_and_restarts_continue_in_the_last(
        self, open_spool: OpenSpool, tmp_path: Path
    ) -> None:
        spool = open_spool(segment_bytes_max=100)
        for number in range(10):
            await spool.commit(spool.append(b"x" * 30 + b"%d" % number))
        count = len(_segments(tmp_path))
        assert count == 5
        spool.close()
        spool = open_spool(segment_bytes_max=1_000)
        spool.append(b"last")
        assert len(_segments(tmp_path)) == count
        assert len(_records(spool)) == 11

    async def test_a_record_larger_than_a_segment_gets_one_of_its_own(self, open_spool: OpenSpool) -> None:
        spool = open_spool(segment_bytes_max=50)
        for size in (10, 200, 10):
            spool.append(b"x" * size)
        assert [len(record) for record in _records(spool)] == [10, 200, 10]

    async def test_many_windows_are_read_as_one_stream(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        records = [b"%05d" % number + b"y" * (number % 5_000) for number in range(400)]
        for record in records:
            spool.append(record)
        assert _records(spool) == records
        assert spool.damaged_stretches == 0

    def test_two_processes_never_share_a_directory(self, open_spool: OpenSpool) -> None:
        open_spool()
        with pytest.raises(SpoolInUse, match="another process"):
            open_spool()

    async def test_a_closed_spool_takes_nothing(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        spool.append(b"x")
        spool.close()
        with pytest.raises(BillingUnavailable):
            spool.append(b"y")
        assert _records(open_spool()) == [b"x"]


class TestCommit:
    async def test_whoever_waits_together_shares_a_sync(
        self, open_spool: OpenSpool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        syncs: list[int] = []
        monkeypatch.setattr(os, "fdatasync", syncs.append)
        spool = open_spool()
        del syncs[:]

        async def write(number: int) -> None:
            await spool.commit(spool.append(b"%d" % number))

        await asyncio.gather(*(write(number) for number in range(100)))
        assert len(syncs) == 1

    async def test_a_commit_returns_only_after_a_sync_that_began_behind_its_append(
        self, open_spool: OpenSpool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        durable = 0
        spool = open_spool()

        def sync(_descriptor: int) -> None:
            nonlocal durable
            durable = spool._segments[-1].path.stat().st_size

        monkeypatch.setattr(os, "fdatasync", sync)

        async def write(number: int) -> None:
            for _ in range(20):
                position = spool.append(b"%d" % number)
                await spool.commit(position)
                assert durable >= position

        await asyncio.gather(*(write(number) for number in range(8)))

    async def test_what_is_durable_needs_no_sync(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        position = spool.append(b"x")
        await spool.commit(position)
        commit = spool.commit(position)
        with pytest.raises(StopIteration):
            commit.send(None)

    async def test_a_waiter_that_leaves_does_not_disturb_the_others(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        waiting = [asyncio.create_task(spool.commit(spool.append(b"x"))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), asyncio.CancelledError, type(None)]

    async def test_a_full_segment_is_synced_before_what_follows_it_counts(
        self, open_spool: OpenSpool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: list[str] = []
        fsync, fdatasync = os.fsync, os.fdatasync
        spool = open_spool(segment_bytes_max=40)

        def whole(descriptor: int) -> None:
            order.append("whole")
            fsync(descriptor)

        def data(descriptor: int) -> None:
            order.append("data")
            fdatasync(descriptor)

        monkeypatch.setattr(os, "fsync", whole)
        monkeypatch.setattr(os, "fdatasync", data)
        spool.append(b"x" * 20)
        await spool.commit(spool.append(b"y" * 20))
        assert order == ["whole", "data", "whole"]  # the old segment, the new one, the directory


class TestBounds:
    async def test_at_the_high_water_mark_new_work_is_refused_and_endings_go_in(self, open_spool: OpenSpool) -> None:
        spool = open_spool(segment_bytes_max=100, high_water_bytes=300)
        while spool.used_bytes < 300:
            spool.append(b"x" * 20, admits=True)
        with pytest.raises(BillingUnavailable) as refusal:
            spool.append(b"begin", admits=True)
        assert refusal.value.retry_after_s == 5
        spool.append(b"end")
        assert _records(spool)[-1] == b"end"
        spool.save_checkpoint(spool.end)
        spool.append(b"begin", admits=True)

    async def test_drained_segments_are_deleted_and_undrained_ones_kept(
        self, open_spool: OpenSpool, tmp_path: Path
    ) -> None:
        spool = open_spool(segment_bytes_max=60)
        positions = [spool.append(b"x" * 40 + b"%d" % number) for number in range(6)]
        assert len(_segments(tmp_path)) == 6
        spool.save_checkpoint(positions[2])
        assert len(_segments(tmp_path)) == 3
        assert len(_records(spool)) == 3
        spool.close()
        assert len(_records(open_spool(segment_bytes_max=60))) == 3

    async def test_a_checkpoint_never_moves_back(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        position = spool.append(b"x")
        spool.save_checkpoint(position)
        spool.save_checkpoint(0)
        assert spool.checkpoint == position

    @pytest.mark.parametrize("content", [b"", b"12", b"12 00000000\n", b"\xff\xfe"])
    async def test_a_damaged_checkpoint_only_makes_the_reader_begin_earlier(
        self, open_spool: OpenSpool, tmp_path: Path, content: bytes
    ) -> None:
        spool = open_spool()
        spool.append(b"x")
        spool.save_checkpoint(spool.end)
        spool.close()
        (tmp_path / "spool" / "checkpoint").write_bytes(content)
        assert _records(open_spool()) == [b"x"]

    async def test_positions_lost_with_the_power_are_not_used_again(
        self, open_spool: OpenSpool, tmp_path: Path
    ) -> None:
        spool = open_spool()
        spool.append(b"kept")
        kept = spool.end
        spool.append(b"drained before it was durable")
        drained = spool.end
        spool.save_checkpoint(drained)
        spool.close()
        os.truncate(_segments(tmp_path)[0], kept)
        spool = open_spool()
        assert spool.end == drained
        spool.append(b"new")
        assert _records(spool) == [b"new"]


class TestDamage:
    @pytest.mark.load
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
    @given(st.lists(st.binary(min_size=1, max_size=30), max_size=8), st.data())
    async def test_a_tail_torn_at_any_byte_leaves_a_prefix_to_append_to(
        self, tmp_path_factory: pytest.TempPathFactory, records: list[bytes], data: st.DataObject
    ) -> None:
        directory = tmp_path_factory.mktemp("torn")
        framed = b"".join(map(encode, records))
        cut = data.draw(st.integers(0, len(framed)))
        (directory / f"{0:020d}.spool").write_bytes(framed[:cut])
        spool = Spool(directory)
        before = _records(spool)
        assert before == records[: len(before)]
        assert len(b"".join(map(encode, before))) <= cut
        assert len(before) == len(records) or len(b"".join(map(encode, records[: len(before) + 1]))) > cut
        spool.append(b"after")
        assert _records(spool) == [*before, b"after"]
        assert spool.damaged_stretches == 0
        spool.close()

    async def test_every_byte_of_one_torn_record_is_cut(self, tmp_path: Path) -> None:
        whole, torn = encode(b"whole"), encode(b"torn record")
        for kept in range(len(torn)):
            directory = tmp_path / str(kept)
            directory.mkdir()
            path = directory / f"{0:020d}.spool"
            path.write_bytes(whole + torn[:kept])
            spool = Spool(directory)
            assert _records(spool) == [b"whole"]
            assert path.stat().st_size == len(whole)
            spool.close()

    async def test_damage_in_the_middle_is_skipped_and_counted(self, open_spool: OpenSpool, tmp_path: Path) -> None:
        spool = open_spool(segment_bytes_max=200)
        for number in range(12):
            spool.append(b"record %02d" % number)
        spool.close()
        first = _segments(tmp_path)[0]
        content = bytearray(first.read_bytes())
        content[len(encode(b"record 00")) + 15] ^= 0xFF
        first.write_bytes(content)
        spool = open_spool(segment_bytes_max=200)
        assert _records(spool) == [b"record %02d" % number for number in range(12) if number != 1]
        assert spool.damaged_stretches == 1

    async def test_damage_longer_than_a_reading_window_is_one_stretch(self, tmp_path: Path) -> None:
        directory = tmp_path / "spool"
        directory.mkdir()
        noise = bytes(1_000_000)
        (directory / f"{0:020d}.spool").write_bytes(encode(b"before") + noise + encode(b"behind"))
        spool = Spool(directory)
        assert _records(spool) == [b"before", b"behind"]
        assert spool.damaged_stretches == 1
        spool.close()

    async def test_a_segment_cut_short_in_the_middle_loses_only_its_own_tail(
        self, open_spool: OpenSpool, tmp_path: Path
    ) -> None:
        spool = open_spool(segment_bytes_max=60)
        for number in range(6):
            spool.append(b"x" * 10 + b"%d" % number)
        spool.close()
        first = _segments(tmp_path)[0]
        os.truncate(first, first.stat().st_size - 3)
        spool = open_spool(segment_bytes_max=60)
        assert [record[-1:] for record in _records(spool)] == [b"0", b"2", b"3", b"4", b"5"]


class TestFailingDisk:
    async def test_a_full_disk_stops_everything_until_a_probe_goes_in(
        self, open_spool: OpenSpool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = open_spool()
        await spool.commit(spool.append(b"before"))
        disk = _FullDisk(monkeypatch)
        disk.full = True
        for _ in range(2):
            with pytest.raises(BillingUnavailable):
                spool.append(b"lost")
        assert spool.failed
        with pytest.raises(BillingUnavailable):
            await spool.probe()
        disk.full = False
        with pytest.raises(BillingUnavailable):  # only a probe ends it
            spool.append(b"lost")
        await spool.probe()
        await spool.commit(spool.append(b"after"))
        assert _records(spool) == [b"before", b"after"]
        assert spool.damaged_stretches == 0

    async def test_half_a_record_on_a_nearly_full_disk_is_taken_back(
        self, open_spool: OpenSpool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = open_spool()
        spool.append(b"before")
        disk = _FullDisk(monkeypatch)
        disk.half = True
        with pytest.raises(BillingUnavailable):
            spool.append(b"a record of some length")
        disk.half = False
        await spool.probe()
        spool.append(b"after")
        assert _records(spool) == [b"before", b"after"]
        assert spool.damaged_stretches == 0
        spool.close()
        assert _records(open_spool()) == [b"before", b"after"]

    async def test_a_failed_sync_is_told_to_all_who_wait_and_never_retried_on_the_same_file(
        self, open_spool: OpenSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = open_spool()
        real = os.fdatasync

        def failing(_descriptor: int) -> None:
            raise OSError(errno.EIO, "input/output error")

        monkeypatch.setattr(os, "fdatasync", failing)
        position = spool.append(b"doubtful")
        results = await asyncio.gather(*(spool.commit(position) for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [BillingUnavailable] * 3
        assert spool.failed
        monkeypatch.setattr(os, "fdatasync", real)
        await spool.probe()
        assert len(_segments(tmp_path)) == 2
        with pytest.raises(BillingUnavailable):  # the new segment's sync says nothing about the old one
            await spool.commit(position)
        await spool.commit(spool.append(b"after"))

    async def test_a_probe_of_a_healthy_spool_does_nothing(self, open_spool: OpenSpool) -> None:
        spool = open_spool()
        before = spool.end
        await spool.probe()
        assert spool.end == before

    async def test_a_disk_full_for_long_makes_no_heap_of_segments(
        self, open_spool: OpenSpool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = open_spool()
        disk = _FullDisk(monkeypatch)
        disk.full = True
        with pytest.raises(BillingUnavailable):
            spool.append(b"x")
        for _ in range(20):
            with pytest.raises(BillingUnavailable):
                await spool.probe()
        assert len(_segments(tmp_path)) == 1


class _FullDisk:
    """Writes of whole records fail, or stop half-way, while the flag is up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.half = False
        real = os.write

        def write(descriptor: int, data: bytes) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "no space left on device")
            return real(descriptor, data[: len(data) // 2] if self.half else data)

        monkeypatch.setattr(os, "write", write)


_WRITER = """
import asyncio, sys
from pathlib import Path
from billing.spool import Spool

async def main():
    spool = Spool(Path(sys.argv[1]), segment_bytes_max=4096)
    async def write(worker):
        number = 0
        while True:
            record = b"%d/%d" % (worker, number)
            await spool.commit(spool.append(record))
            sys.stdout.buffer.write(record + b"\\n")
            sys.stdout.buffer.flush()
            number += 1
    await asyncio.gather(*(write(worker) for worker in range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize("kill_after", [1, 40, 400])
def test_what_was_confirmed_before_a_kill_is_there_once(tmp_path: Path, kill_after: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path / "spool")], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    confirmed = [writer.stdout.readline().strip() for _ in range(kill_after)]
    writer.send_signal(signal.SIGKILL)
    confirmed += [line.strip() for line in writer.stdout if line.endswith(b"\n")]
    writer.wait()
    writer.stdout.close()
    spool = Spool(tmp_path / "spool")
    found = _records(spool)
    assert set(confirmed) <= set(found)
    assert len(found) == len(set(found))
    for worker in range(4):  # each worker's records are a prefix of what it wrote
        own = [record for record in found if record.startswith(b"%d/" % worker)]
        assert own == [b"%d/%d" % (worker, number) for number in range(len(own))]
    spool.close()


def test_a_position_is_a_plain_integer() -> None:
    assert Position(3) + 1 == 4
