import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer

from backends.local.errors import InvalidRequestError, StartError
from backends.local.tokenizer import Tokenizer
from tests.engines import IM_END, build_tiny_checkpoint

CHAT = [{"role": "user", "content": "the gate"}]


def with_template(folder: Path, template: str) -> Tokenizer:
    build_tiny_checkpoint(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return Tokenizer(folder)


def test_a_conversation_is_rendered_and_waits_for_the_assistant(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.render_chat(CHAT) == "<|im_start|>user\nthe gate<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_of_a_conversation_are_single_ids(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode_chat(CHAT)
    assert ids[0] == 1
    assert ids.count(IM_END) == 1


def test_token_bytes_of_any_text_make_that_text(tiny_tokenizer: Tokenizer) -> None:
    text = "the pages 北京 größer 🙂\n\t end"
    shown = b"".join(tiny_tokenizer.token_bytes[token] for token in tiny_tokenizer.encode(text))
    assert shown.decode() == text


def test_token_bytes_agree_with_the_library_s_own_decoding(tiny_tokenizer: Tokenizer, tiny_checkpoint: Path) -> None:
    library = RustTokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    for token in range(tiny_tokenizer.size):
        shown = tiny_tokenizer.token_bytes[token].decode(errors="replace")
        assert shown == library.decode([token], skip_special_tokens=True)


def test_a_special_token_shows_nothing_but_has_a_name(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.token_bytes[IM_END] == b""
    assert tiny_tokenizer.token_text(IM_END) == b"<|im_end|>"


def test_the_checkpoint_says_what_ends_an_answer(tiny_tokenizer: Tokenizer) -> None:
    assert tiny_tokenizer.stop_token_ids == {IM_END}


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for a in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_template_is_a_refusal_and_reaches_nothing(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(InvalidRequestError, match="template"):
        tokenizer.encode_chat(CHAT)


def test_a_template_that_does_not_compile_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="compiled"):
        with_template(tmp_path, "{% for %}")


def test_a_template_trims_blocks_as_transformers_does(tmp_path: Path) -> None:
    tokenizer = with_template(
        tmp_path, "{% for m in messages %}\n  {% if true %}\n{{ m.content }}{% endif %}\n{% endfor %}"
    )
    assert tokenizer.render_chat(CHAT) == "the gate"


def test_a_model_without_a_template_refuses_conversations(tmp_path: Path) -> None:
    build_tiny_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer(tmp_path).encode_chat(CHAT)


def test_a_folder_without_a_tokenizer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
