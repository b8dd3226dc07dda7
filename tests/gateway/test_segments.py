"""In segments or whole: the ids are the same, for any history and for tokenizers that can't be cut."""

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway.prompt import _compile
from gateway.segments import SegmentTokenizer
from tests.engines import build_tiny_checkpoint

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}<|im_start|>assistant\n<think>"
)
PIECES = [
    "the pages", " ", "  ", "\n", "\n\n", "42", "é", "🙂", "'s", " don't", "\t", "<", "|im_start|>", "<|im_start|>",
    "<|im_end|>", "<|im_start", "<think>", "</think>", "<th", "ink>", "\x00", "a" * 40, "…", "，", "ไทย",
]  # fmt: skip


def trained(folder: Path) -> Tokenizer:
    """A byte-level tokenizer whose added tokens overlap: `<think>` and `<think>s`, one special and one not."""
    build_tiny_checkpoint(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "<think>s", "</think>")])
    return tokenizer


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def histories(seed: int, count: int) -> list[str]:
    draw, template = random.Random(seed), _compile(TEMPLATE)
    return [
        template.render(
            messages=[
                {
                    "role": draw.choice(["system", "user", "assistant", "tool"]),
                    "content": "".join(draw.choices(PIECES, k=draw.randrange(12))),
                }
                for _ in range(draw.randrange(1, 6))
            ]
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_the_segments_of_any_history_make_the_ids_of_the_whole(tmp_path: Path, seed: int) -> None:
    tokenizer = trained(tmp_path)
    segments = SegmentTokenizer(tokenizer)
    texts = histories(seed, 400)
    fresh = [segments.encode(text) for text in texts]
    segments.learn(histories(seed + 1_000, 40), without="pages")
    assert len(segments._known) > 10
    for text, first in zip(texts, fresh, strict=True):
        assert first == segments.encode(text) == whole(tokenizer, text), repr(text)


def test_what_the_template_writes_is_tokenised_once(tmp_path: Path) -> None:
    segments = SegmentTokenizer(trained(tmp_path))
    template, added = _compile(TEMPLATE), set(segments._known)
    segments.learn([template.render(messages=[{"role": "user", "content": "WORDS"}])], without="WORDS")
    assert set(segments._known) - added == {"\n", "assistant\n"}


def test_half_a_character_is_refused_as_by_the_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        SegmentTokenizer(trained(tmp_path)).encode("<|im_start|>\ud83d")


@pytest.mark.parametrize("kind", ["metaspace", "space in front", "normaliser", "strips", "none", "split", "no added"])
def test_a_tokenizer_that_looks_beyond_a_segment_gets_the_whole_text(kind: str) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    cuttable = kind in {"split", "no added"}
    match kind:
        case "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        case "space in front":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "split":
            split = pre_tokenizers.Split(Regex(r"\d|\s"), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case "none":
            pass
        case _:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "normaliser":
        tokenizer.normalizer = normalizers.Prepend("_")
    texts = [text for seed in range(3) for text in histories(seed, 60)]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["?"]))
    if kind != "no added":
        tokenizer.add_tokens([AddedToken("<|im_start|>", normalized=False, lstrip=kind == "strips")])
    segments = SegmentTokenizer(tokenizer)
    assert (segments._cut is not None) == cuttable
    segments.learn(texts[:20], without="pages")
    for text in texts[20:]:
        assert segments.encode(text) == whole(tokenizer, text)
