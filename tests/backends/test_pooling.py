"""What an encoder's folder says of pooling, and what of it can't be served."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.pooling import POOLING_FILE, Pooling, PoolingUnknownError, pooling_of, say_pooling


def _write(folder: Path, said: Any) -> None:
    (folder / POOLING_FILE).parent.mkdir()
    (folder / POOLING_FILE).write_text(said if isinstance(said, str) else json.dumps(said))


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) is None


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_what_is_written_is_read_again(tmp_path: Path, pooling: Pooling) -> None:
    say_pooling(tmp_path, pooling)
    assert pooling_of(tmp_path) == pooling
    assert [one.name for one in (tmp_path / POOLING_FILE).parent.iterdir()] == ["config.json"]


def test_the_file_of_sentence_transformers_is_understood(tmp_path: Path) -> None:
    marks = dict.fromkeys(("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"), False)
    said = {f"pooling_mode_{mark}": on for mark, on in (marks | {"mean_tokens": True}).items()}
    _write(tmp_path, {"word_embedding_dimension": 384, "include_prompt": True} | said)
    assert pooling_of(tmp_path) == "mean"


@pytest.mark.parametrize(
    "said",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": False},
        {},
        [],
        "no json",
    ],
)
def test_another_pooling_is_refused_and_not_guessed(tmp_path: Path, said: Any) -> None:
    _write(tmp_path, said)
    with pytest.raises(PoolingUnknownError, match=r"pooling_mode|read|no pooling"):
        pooling_of(tmp_path)
