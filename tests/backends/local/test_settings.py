from pathlib import Path

import pytest

from backends.local.settings import GIB, parse_settings


def test_the_defaults_are_the_embedded_engine_s() -> None:
    settings = parse_settings(["--model-path", "/models/small"])
    assert settings.model_path == Path("/models/small")
    assert settings.served_model_name == "small"
    assert (settings.kv_cache_bytes, settings.page_size, settings.threads) == (GIB, 16, None)
    assert settings.host == "127.0.0.1", "nobody but this machine, unless told otherwise"


@pytest.mark.parametrize(
    "flags",
    [["--kv-cache-dtype", "int3"], ["--page-size", "0"], ["--port", "x"], ["--unknown", "1"], ["--threads", "-1"]],
)
def test_a_malformed_flag_ends_the_process_and_is_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--model-path", "/m", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
