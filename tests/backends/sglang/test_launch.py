"""Golden command lines: what is run on the machines is written here word for word."""

import shlex

import pytest

from backends.serverless import Serverless
from backends.sglang.launch import EngineCommand, engine_commands
from tests.backends.sglang.deployments import attached, example

STRICT_CALLS = ("SGLANG_TOOL_STRICT_LEVEL", "2")
ALL_GPUS = ("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
COMMON_ENVIRONMENT = (
    ("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "256"),
    ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0"),
)


def words(command: EngineCommand) -> str:
    return " ".join(command.argv)


def test_kimi_is_one_engine_over_eight_gpus() -> None:
    [command] = engine_commands(example("kimi-k2.6.toml"))
    assert (command.name, command.role) == ("a", "unified")
    assert command.environment == (*COMMON_ENVIRONMENT, STRICT_CALLS, ALL_GPUS)
    assert words(command) == (
        "python3 -m sglang.launch_server --model-path /models/Kimi-K2.6 --served-model-name @cf/moonshotai/kimi-k2.6 "
        "--host 127.0.0.1 --port 30000 --kv-cache-dtype fp8_e4m3 --page-size 64 --context-length 262144 --tp-size 8 "
        "--mem-fraction-static 0.88 --max-running-requests 256 --chunked-prefill-size 8192 --enable-metrics "
        "--enable-cache-report --schedule-conservativeness 0.3 --trust-remote-code --attention-backend flashmla "
        "--tool-call-parser kimi_k2 --reasoning-parser kimi_k2"
    )


def test_glm_is_a_pair_with_fp8_weights_for_prompts_and_int4_weights_for_decoding() -> None:
    prefill, decode = engine_commands(example("glm-5.2.toml"))
    assert (prefill.name, prefill.role) == ("a-prefill", "prefill")
    assert prefill.environment == (*COMMON_ENVIRONMENT, STRICT_CALLS, ALL_GPUS)
    assert words(prefill) == (
        "python3 -m sglang.launch_server --model-path /models/GLM-5.2-FP8 --served-model-name @cf/zai-org/glm-5.2 "
        "--host 10.0.0.11 --port 30000 --kv-cache-dtype fp8_e4m3 --page-size 64 --context-length 131072 --tp-size 8 "
        "--mem-fraction-static 0.82 --chunked-prefill-size 16384 --enable-metrics --enable-cache-report "
        "--schedule-conservativeness 0.3 --disaggregation-mode prefill --disaggregation-transfer-backend mooncake "
        "--disaggregation-bootstrap-port 8998 --tool-call-parser glm47 --reasoning-parser glm45"
    )
    assert (decode.name, decode.role) == ("a-decode", "decode")
    assert words(decode) == (
        "python3 -m sglang.launch_server --model-path /models/GLM-5.2-INT4 --tokenizer-path /models/GLM-5.2-FP8 "
        "--served-model-name @cf/zai-org/glm-5.2 --host 10.0.0.12 --port 30000 --kv-cache-dtype fp8_e4m3 "
        "--page-size 64 --context-length 131072 --tp-size 8 --mem-fraction-static 0.9 --max-running-requests 128 "
        "--enable-metrics --enable-cache-report --schedule-conservativeness 0.3 --disaggregation-mode decode "
        "--disaggregation-transfer-backend mooncake --disaggregation-bootstrap-port 8998 --tool-call-parser glm47 "
        "--reasoning-parser glm45"
    )


def test_every_way_to_split_and_every_size_is_passed_through() -> None:
    launch = {
        "python": "/opt/sglang/bin/python",
        "port": 1,
        "tensor_parallel": 8,
        "pipeline_parallel": 2,
        "data_parallel": 4,
        "expert_parallel": 8,
        "total_tokens_max": 4096,
        "reserved_output_tokens_max": 64,
        "schedule_conservativeness": 0.5,
        "environment": {"NCCL_DEBUG": "WARN"},
    }
    weights = {"checkpoint": "/m", "precision": "fp8", "quantization": "fp8", "kv_scales": "/m/scales.json"}
    [command] = engine_commands(attached(replicas=[{"name": "a", "weights": weights, "launch": launch}]))
    assert command.argv[0] == "/opt/sglang/bin/python"
    for flags in (
        "--tp-size 8 --pp-size 2 --dp-size 4 --ep-size 8",
        "--max-total-tokens 4096",
        "--schedule-conservativeness 0.5",
        "--quantization fp8 --quantization-param-path /m/scales.json",
    ):
        assert flags in words(command)
    environment = dict(command.environment)
    assert environment["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] == "64"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize(("required", "variable"), [(True, "1"), (False, None)])
def test_page_tags_wake_the_plugin_only_where_they_are_required(required: bool, variable: str | None) -> None:  # noqa: FBT001 - pytest's parameter
    weights = {"checkpoint": "/m", "precision": "fp8"}
    replica = {"name": "a", "weights": weights, "launch": {"port": 1}}
    [command] = engine_commands(attached(page_tags=required, replicas=[replica]))
    assert dict(command.environment).get("PAGEGATE_PAGE_TAGS") == variable


@pytest.mark.parametrize(
    ("depth", "flags"),
    [("stopped", []), ("released", ["--enable-memory-saver", "--enable-weights-cpu-backup"])],
)
def test_an_engine_that_is_to_give_up_its_memory_is_told_so_at_its_start(depth: str, flags: list[str]) -> None:
    sleepy = example("kimi-k2.6.toml").model_copy(update={"serverless": Serverless.model_validate({"depth": depth})})
    [command] = engine_commands(sleepy)
    assert [word for word in command.argv if "memory-saver" in word or "backup" in word] == flags


def test_engines_that_are_attached_to_have_no_command_line() -> None:
    assert engine_commands(attached()) == []


def test_the_shell_form_is_the_same_command() -> None:
    [command] = engine_commands(example("kimi-k2.6.toml"))
    pasted = shlex.split(command.as_shell().replace("\\\n", " "))
    assignments = [f"{name}={value}" for name, value in command.environment]
    assert pasted == [*assignments, *command.argv]
