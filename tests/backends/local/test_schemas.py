"""What a request leaves open, the checkpoint's recommendation fills; what neither says has SGLang's default."""

import json
from pathlib import Path

from backends.local.schemas import ChatBody
from backends.local.tokenizer import Tokenizer
from tests.engines import build_tiny_checkpoint

ASKED = {"messages": [{"role": "user", "content": "hi"}]}


def test_the_checkpoint_recommends_and_the_request_decides(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path)
    config = tmp_path / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": 2, "do_sample": True, "temperature": 0.2, "top_p": 0.9}))
    usual = Tokenizer(tmp_path).usual_sampling
    silent = ChatBody.model_validate(ASKED).sampling(usual)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.repetition_penalty) == (0.2, 0.9, -1, 1.0)
    asked = ChatBody.model_validate({**ASKED, "temperature": 0.0, "top_p": 1.0}).sampling(usual)
    assert (asked.temperature, asked.top_p) == (0.0, 1.0)


def test_without_a_recommendation_the_defaults_are_sglangs(tmp_path: Path) -> None:
    usual = Tokenizer(build_tiny_checkpoint(tmp_path)).usual_sampling
    silent = ChatBody.model_validate(ASKED).sampling(usual)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (1.0, 1.0, -1, 0.0)
