"""Which weights a token is computed with: those of its phase, however the step holds it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.local.precision import WeightPrecision
from backends.local.weights import Checkpoint, LayerWeights
from tests.backends.local.conftest import StartTiny, TinyEngine
from tests.backends.local.test_engine import PROMPT, outputs, prompts

SPLIT: dict[str, Any] = {"prefill_weights": WeightPrecision.FP8, "decode_weights": WeightPrecision.INT4}


def watch(tiny: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[WeightPrecision, list[int]]]:
    """The positions that each pass computed, and with what."""
    model = tiny.engine._runner._model
    original, seen = model.forward, []

    def forward(tokens: Any, layout: Any, pool: Any, precision: WeightPrecision) -> Any:
        seen.append((precision, layout.positions.tolist()))
        return original(tokens, layout, pool, precision)

    monkeypatch.setattr(model, "forward", forward)
    return seen


def test_a_prompt_is_prefill_and_every_produced_token_decode(
    tiny_engine: StartTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_engine(chunk=3, **SPLIT)
    seen = watch(tiny, monkeypatch)
    tiny.submit(PROMPT, 3)
    tiny.drain()
    assert [positions for precision, positions in seen if precision is WeightPrecision.FP8] == [
        [0, 1, 2],
        [3, 4, 5],
        [6],
    ], "the last token of a prompt that stands alone in its step, too"
    assert [positions for precision, positions in seen if precision is WeightPrecision.INT4] == [[7], [8]]


def test_a_mixed_step_is_two_passes(tiny_engine: StartTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_engine(**SPLIT)
    tiny.submit(PROMPT, 4)
    tiny.step()
    seen = watch(tiny, monkeypatch)
    tiny.submit(PROMPT[::-1], 4)
    tiny.step()
    assert seen == [(WeightPrecision.FP8, list(range(7))), (WeightPrecision.INT4, [7])]
    tiny.drain()


def test_produced_tokens_that_were_retracted_are_computed_again_with_the_weights_they_had(
    tiny_engine: StartTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_engine(pages=8, **SPLIT)
    seen = watch(tiny, monkeypatch)
    for at, prompt in enumerate(prompts(6, longest=20)):
        tiny.submit(prompt, 40, seed=at)
    tiny.drain()
    assert tiny.engine.totals.retractions > 0
    assert any(len(positions) > 8 for precision, positions in seen if precision is WeightPrecision.INT4), "a chunk"


@pytest.mark.load
@pytest.mark.parametrize("decode", list(WeightPrecision))
def test_chunks_batches_and_retractions_change_no_output(tiny_engine: StartTiny, decode: WeightPrecision) -> None:
    given: dict[str, Any] = {"decode_weights": decode}
    ample = outputs(tiny_engine, **given)
    assert ample == outputs(tiny_engine, running=1, **given)
    assert ample == outputs(tiny_engine, chunk=7, **given)
    assert ample == outputs(tiny_engine, pages=8, **given)


def test_decode_weights_change_no_first_token_and_prefill_weights_may(tiny_engine: StartTiny) -> None:
    plain = outputs(tiny_engine)
    coarse = outputs(tiny_engine, decode_weights=WeightPrecision.INT4)
    assert [one[0] for one in coarse] == [one[0] for one in plain]
    assert coarse != plain
    assert outputs(tiny_engine, prefill_weights=WeightPrecision.INT4) != plain


def test_a_precision_that_both_phases_ask_for_is_one_copy(tiny_engine: StartTiny) -> None:
    single = tiny_engine().engine.weight_bytes
    both: dict[str, Any] = {"prefill_weights": WeightPrecision.FP8, "decode_weights": WeightPrecision.FP8}
    assert tiny_engine(**both).engine.weight_bytes == single
    assert tiny_engine(decode_weights=WeightPrecision.FP8).engine.weight_bytes > single


def test_fp8_weights_are_e4m3_times_a_power_of_two_for_each_output(tiny_checkpoint: Path) -> None:
    checkpoint = Checkpoint(tiny_checkpoint, torch.float64)
    name = "model.layers.0.mlp.down_proj"
    product = LayerWeights(checkpoint, [WeightPrecision.FP8]).product(WeightPrecision.FP8, name)
    wide = product(torch.eye(128, dtype=torch.float64)).t()
    exact = checkpoint.tensor(f"{name}.weight")
    assert not torch.equal(wide, exact)
    torch.testing.assert_close(wide, exact, rtol=2**-4, atol=float(exact.abs().max()) * 2**-17)
    mantissas = torch.frexp(wide).mantissa * 16
    assert torch.equal(mantissas, mantissas.round()), "four significant bits"
