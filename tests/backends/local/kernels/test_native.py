"""The compiled kernels against their equals in torch, on the same bfloat16 inputs."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.local.attention import Extent, Layout, lay_out
from backends.local.kernels.build import built_library
from backends.local.kernels.native import NativeKernels, Shape, supports
from backends.local.kernels.protocol import Norm, Rotary
from backends.local.kernels.torch_kernels import TorchKernels
from backends.local.kv.pool import FP8, KVPool

STEP = 2**-8
"""Half a step of bfloat16, as a share of the value."""
PAGE = 16
SHAPES = [(9, 3, 64), (4, 4, 32), (16, 1, 128), (2, 2, 16)]
"""Query heads, key heads, head size."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    library = built_library(tmp_path_factory.mktemp("kernels"))
    assert library is not None, "the tests need a C compiler"
    return NativeKernels(library)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Both paths of every loop that may be shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_equal_to_a_step(got: Tensor, wanted: Tensor, share_of_exact: float = 0.99) -> None:
    """Nearly all the same, the rest one step of bfloat16 off."""
    torch.testing.assert_close(got.float(), wanted.float(), rtol=2 * STEP, atol=1e-6)
    assert (got == wanted).float().mean() >= share_of_exact


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("width", [64, 576])
def test_norms_add_in_place_and_equal_those_of_torch(native: NativeKernels, rows: int, width: int) -> None:
    norm = Norm(randn(width, seed=2), 1e-5)
    given, added = randn(rows, width), randn(rows, width, seed=3)
    theirs, ours = given.clone(), given.clone()
    assert_equal_to_a_step(native.norm(ours, norm), TorchKernels().norm(theirs, norm))
    assert torch.equal(ours, given)
    assert_equal_to_a_step(native.norm(ours, norm, added), TorchKernels().norm(theirs, norm, added))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [1, 30])
def test_gates_equal_those_of_torch_over_the_whole_range(native: NativeKernels, rows: int) -> None:
    both = randn(rows, 3072) * 8
    both[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e6, -1e6])
    assert_equal_to_a_step(native.gate(both), TorchKernels().gate(both))


def rotary(size: int) -> Rotary:
    angles = torch.outer(torch.arange(4096).float(), 10_000.0 ** (-torch.arange(0, size, 2).float() / size))
    cosines, sines = angles.cos(), angles.sin()
    return Rotary(torch.cat((cosines, cosines), -1).bfloat16(), torch.cat((-sines, sines), -1).bfloat16())


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
def test_rotated_heads_and_stored_bytes_are_those_of_torch(
    native: NativeKernels, heads: int, kv_heads: int, size: int, stored: torch.dtype
) -> None:
    given = randn(40, (heads + 2 * kv_heads) * size)
    # Rows of zeros, of huge and of tiny numbers, and the border where the scale changes.
    given[0], given[1], given[2] = 0.0, given[1] * 1e30, given[2] * 1e-30
    given[3, -size:] = torch.linspace(-448, 448, size).bfloat16()
    layout = lay_out([], [Extent(list(range(9, 0, -1)), 100, 40)], PAGE, torch.bfloat16)
    outcomes = []
    for kernels in (native, TorchKernels()):
        pool = KVPool(
            layers=2, pages=10, page_size=PAGE, kv_heads=kv_heads, head_size=size, dtype=torch.bfloat16, stored=stored
        )
        qkv = given.clone()
        kernels.rotate_and_store(qkv, rotary(size), pool, 1, layout)
        outcomes.append((qkv, pool.values.view(torch.uint8), pool.scales))
    (our_qkv, our_values, our_scales), (their_qkv, their_values, their_scales) = outcomes
    assert torch.equal(our_qkv, their_qkv)
    assert torch.equal(our_values, their_values)
    assert our_scales is their_scales is None or torch.equal(our_scales, their_scales)  # type: ignore[arg-type]  # both or neither


def filled_pool(stored: torch.dtype, heads: tuple[int, int], lengths: list[int]) -> tuple[KVPool, Layout]:
    kv_heads, size = heads
    numbers = list(range(sum(-(-length // PAGE) for length in lengths) + 3))
    random.Random(5).shuffle(numbers)
    pool = KVPool(
        layers=2, pages=len(numbers), page_size=PAGE, kv_heads=kv_heads, head_size=size, dtype=torch.bfloat16,
        stored=stored,
    )  # fmt: skip
    everything = torch.arange(len(numbers) * PAGE)
    pool.store(1, everything, randn(len(everything), 2 * kv_heads * size, seed=4))
    extents = [Extent([numbers.pop() for _ in range(-(-length // PAGE))], length, 1) for length in lengths]
    return pool, lay_out(extents, [], PAGE, torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
@pytest.mark.parametrize("lengths", [[1], [700], [2000, 257, 256, 255, 40, 1]])
def test_attention_equals_that_of_torch(
    native: NativeKernels, shape: tuple[int, int, int], stored: torch.dtype, lengths: list[int]
) -> None:
    heads, kv_heads, size = shape
    pool, layout = filled_pool(stored, (kv_heads, size), lengths)
    assert layout.decode is not None
    qkv = randn(len(lengths), (heads + 2 * kv_heads) * size, seed=6) * 2
    got, wanted = (kernels.attend(qkv, pool, 1, layout.decode) for kernels in (native, TorchKernels()))
    # Torch rounds the weights to bfloat16 before they meet the values.
    torch.testing.assert_close(got.float(), wanted.float(), rtol=4 * STEP, atol=4 * STEP)


@pytest.mark.parametrize("stored", [torch.bfloat16, FP8])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(
    native: NativeKernels, stored: torch.dtype, threads: int
) -> None:
    lengths = [900, 600, 300, 17]
    qkv = randn(len(lengths), (9 + 6) * 64, seed=7)
    pool, layout = filled_pool(stored, (3, 64), lengths)
    assert layout.decode is not None
    torch.set_num_threads(2)
    together = native.attend(qkv, pool, 1, layout.decode)
    torch.set_num_threads(threads)
    for at, length in enumerate(lengths):
        pages = layout.decode.table[at, : -(-length // PAGE)].tolist()
        alone = lay_out([Extent(pages, length, 1)], [], PAGE, torch.bfloat16).decode
        assert alone is not None
        assert torch.equal(native.attend(qkv[at : at + 1], pool, 1, alone)[0], together[at])


def test_what_lies_past_a_sequence_s_length_is_not_read(native: NativeKernels) -> None:
    pool, layout = filled_pool(torch.bfloat16, (3, 64), [20])
    assert layout.decode is not None
    qkv = randn(1, 15 * 64, seed=8)
    before = native.attend(qkv, pool, 1, layout.decode)
    last = int(layout.decode.table[0, 1])
    pool.store(1, torch.arange(last * PAGE + 4, (last + 1) * PAGE), torch.full((12, 6 * 64), torch.nan).bfloat16())
    assert torch.equal(native.attend(qkv, pool, 1, layout.decode), before)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float32}, {"hidden_size": 40}, {"head_size": 8}, {"head_size": 512}, {"heads": 64, "kv_heads": 2}],
)
def test_other_shapes_are_left_to_torch(changes: dict[str, object]) -> None:
    usual: dict[str, object] = {
        "dtype": torch.bfloat16, "hidden_size": 576, "inner_size": 1536, "heads": 9, "kv_heads": 3, "head_size": 64
    }  # fmt: skip
    assert supports(Shape(**usual))  # type: ignore[arg-type]  # a table of keyword arguments
    assert not supports(Shape(**(usual | changes)))  # type: ignore[arg-type]  # as above


@pytest.mark.load
def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    first = built_library(tmp_path / "kept")
    assert first is not None
    written = first.stat().st_mtime_ns
    assert built_library(tmp_path / "kept") == first
    assert first.stat().st_mtime_ns == written
    assert list(first.parent.iterdir()) == [first]


def test_without_a_compiler_or_with_one_that_fails_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert built_library(tmp_path) is None
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o755)
    assert built_library(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["cc"], "nothing half made stays"
