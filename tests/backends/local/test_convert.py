import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import jinja2
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from api.settings import load_settings
from backends.checkpoints import CONVERTER_VERSION, DEFAULT_CHECKPOINT, pull
from backends.local.convert import UnsupportedGgufError, convert, hugging_face_name
from tests.backends.local.reference import transformers
from tests.backends.tiny_gguf import QUANTISED, TEMPLATE, Array, random_weights, write_tiny_gguf

TEXTS = [
    "Hello, world!",
    "In 12345 days it's 3.14159, or 2^10 = 1024.",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n",
    "naïve café, Ünïcödé, ß",
    "日本語のテキスト、中文文本",
    "🙂👩‍👩‍👧‍👦 🇫🇷",
    "שלום مرحبا",
    "def f(x): return x ** 2  # comment",
    "a" * 300,
    "\x00\x01\x7f",
    "e\u0301 combining",
    "½ ² ٣ ௫",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't they're I'll we've",
    "https://example.org/a?b=c&d=%20",
    '{"key": [1, 2.5, null]}',
    "",
    " ",
    "\u200bzero\u200dwidth",
    "MiXeD CaSe 00700",
]


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    return random_weights()


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Array]) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, gguf_path: Path) -> Path:
    out_dir = tmp_path_factory.mktemp("cache") / "tiny"
    convert(gguf_path, out_dir, wheel_sha256="abc")
    return out_dir


def test_tensors_are_the_original_ones_in_bfloat16(folder: Path, weights: dict[str, Array]) -> None:
    converted = load_file(folder / "model.safetensors")
    assert set(converted) == {hugging_face_name(name) for name in weights}
    for name, original in weights.items():
        if name != QUANTISED:
            assert torch.equal(converted[hugging_face_name(name)], torch.from_numpy(original).bfloat16()), name


def test_quantised_tensors_are_what_gguf_says_they_hold(folder: Path, gguf_path: Path) -> None:
    stored = next(tensor for tensor in gguf.GGUFReader(gguf_path).tensors if tensor.name == QUANTISED)
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type)).bfloat16()
    assert torch.equal(load_file(folder / "model.safetensors")[hugging_face_name(QUANTISED)], expected)


@pytest.mark.load
def test_transformers_reads_the_gguf_to_the_same_model(folder: Path, gguf_path: Path) -> None:
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    reference = transformers("modeling_gguf_pytorch_utils").load_gguf_checkpoint(
        str(gguf_path), return_tensors=True, model_to_load=model
    )
    state = model.state_dict()
    assert len(reference["tensors"]) == len(state) - 1  # the tied head
    for name, values in reference["tensors"].items():
        assert torch.equal(state[name], torch.as_tensor(values).bfloat16()), name
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert getattr(model.config, key) == reference["config"][key], key


def test_numbers_kept_as_float32_are_restored(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000.0
    assert config["tie_word_embeddings"] is True
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def test_tokenizer_merges_words_and_splits_digits(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hell w12").tokens == ["hell", "Ġw", "1", "2"]
    assert tokenizer.encode("<|im_start|>he").ids[0] == 1
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_chat_template_is_the_one_in_the_metadata(folder: Path) -> None:
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_manifest_names_source_result_and_version(folder: Path, gguf_path: Path) -> None:
    model = (folder / "model.safetensors").read_bytes()
    assert json.loads((folder / "checkpoint.json").read_text()) == {
        "converter_version": CONVERTER_VERSION,
        "wheel_sha256": "abc",
        "gguf_sha256": hashlib.sha256(gguf_path.read_bytes()).hexdigest(),
        "model_sha256": hashlib.sha256(model).hexdigest(),
        "model_bytes": len(model),
    }


def test_replaces_an_older_folder(tmp_path: Path, gguf_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "stale").touch()
    convert(gguf_path, tmp_path / "tiny")
    assert not (tmp_path / "tiny" / "stale").exists()
    assert (tmp_path / "tiny" / "config.json").exists()


def test_a_failure_leaves_nothing_and_touches_nothing(tmp_path: Path, weights: dict[str, Array]) -> None:
    foreign = write_tiny_gguf(tmp_path / "foreign.gguf", weights, pre_tokenizer="qwen2")
    (tmp_path / "cache" / "tiny").mkdir(parents=True)
    (tmp_path / "cache" / "tiny" / "kept").touch()
    with pytest.raises(UnsupportedGgufError, match="splits text"):
        convert(foreign, tmp_path / "cache" / "tiny")
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["tiny", "kept"]


def test_refuses_a_tensor_of_unknown_use() -> None:
    with pytest.raises(UnsupportedGgufError, match=r"blk\.0\.ssm_in\.weight"):
        hugging_face_name("blk.0.ssm_in.weight")


@pytest.fixture(scope="module")
def real_folder() -> Path:
    return pull(DEFAULT_CHECKPOINT, load_settings().cache_dir, lambda here, total: None)


@pytest.fixture(scope="module")
def real_tokenizer(real_folder: Path) -> Any:
    return transformers().AutoTokenizer.from_pretrained(real_folder)


@pytest.mark.engine
def test_the_real_tokenizer_gives_every_text_back(real_tokenizer: Any) -> None:
    assert len(real_tokenizer) == 49152
    for text in TEXTS:
        assert real_tokenizer.decode(real_tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


@pytest.mark.engine
def test_the_real_tokenizer_never_joins_digits(real_tokenizer: Any) -> None:
    for text in TEXTS:
        for token in real_tokenizer.tokenize(text):
            assert sum(character.isdigit() for character in token) <= 1, token
    assert real_tokenizer.tokenize("12345 days") == ["1", "2", "3", "4", "5", "Ġdays"]


@pytest.mark.engine
def test_the_real_chat_template_renders_with_a_system_line(real_folder: Path, real_tokenizer: Any) -> None:
    template = json.loads((real_folder / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": "Hi"}]
    rendered = jinja2.Template(template, autoescape=False).render(messages=messages, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert real_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == rendered


@pytest.mark.engine
def test_the_real_model_knows_the_capital_of_france(real_folder: Path, real_tokenizer: Any) -> None:
    model = transformers().AutoModelForCausalLM.from_pretrained(real_folder)
    assert model.dtype == torch.bfloat16
    prompt = real_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, do_sample=False, max_new_tokens=12)
    answer = real_tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
