"""Each way in which a server can contradict its deployment file, named by flag and value."""

from typing import Any

import pytest

from backends.page_tags import ACTIVE_METRIC
from backends.sglang.attach import Reports, contradictions
from backends.topology import Model
from tests.backends.sglang.deployments import attached, example

METRICS = 'sglang:page_size{engine_type="unified"} 64.0\n'
ACTIVE = f'{ACTIVE_METRIC}{{tp_rank="0"}} 1.0\n'
IDLE = f'{ACTIVE_METRIC}{{tp_rank="1"}} 0.0\n'


def info(**fields: Any) -> dict[str, Any]:
    """The part of /server_info that matters, of a server that is as `attached()` says."""
    return {
        "page_size": 64,
        "kv_cache_dtype": "fp8_e4m3",
        "context_length": 8192,
        "quantization": None,
        "quantization_param_path": None,
        "disaggregation_mode": "null",
        "enable_metrics": True,
        "enable_cache_report": True,
        "dp_size": 1,
    } | fields


def found(
    model: Model | None = None, *, metrics: str = METRICS, loads: dict[str, Any] | None = None, **fields: Any
) -> list[str]:
    reports = Reports(info(**fields), loads or {"loads": [{}]}, metrics)
    model = model or attached()
    return contradictions(model, "unified", model.replicas[0], reports)


def test_a_server_that_is_as_the_file_says_has_no_contradictions() -> None:
    assert found() == []
    assert found(context_length=None) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"page_size": 1}, "--page-size is 1, the deployment file says 64"),
        ({"kv_cache_dtype": "auto"}, "--kv-cache-dtype is auto, the deployment file says fp8_e4m3"),
        ({"context_length": 4096}, "--context-length is 4096, the deployment file says at least 8192"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode is decode, the deployment file says null"),
        ({"enable_metrics": False}, "--enable-metrics is not set: admission can't see the engine's pages"),
        (
            {"enable_cache_report": False},
            "--enable-cache-report is not set: cached prompt tokens would be billed as new ones",
        ),
        (
            {"quantization_param_path": "/s.json"},
            "--quantization-param-path is /s.json, the deployment file says not set",
        ),
        ({"metrics": ""}, "--enable-metrics is not set: admission can't see the engine's pages"),
    ],
)
def test_each_contradiction_names_the_flag_and_both_values(fields: dict[str, Any], said: str) -> None:
    assert found(**fields) == [said]


def test_ranks_are_those_of_the_file_and_each_reports_its_load() -> None:
    weights = {"checkpoint": "/m", "precision": "fp8"}
    model = attached(replicas=[{"name": "a", "url": "http://h", "weights": weights, "data_parallel": 2}])
    assert found(model, dp_size=2, loads={"loads": [{}, {}]}) == []
    assert found(model, dp_size=2) == ["/v1/loads reports 1 ranks, --dp-size is 2"]
    assert found(model) == ["--dp-size is 1, the deployment file says 2"]
    assert found(dp_size=4, loads={"loads": [{}] * 4}) == ["--dp-size is 4, the deployment file says 1"]


def test_bf16_has_two_names_and_auto_is_neither() -> None:
    model = attached(kv_cache_dtype="bf16")
    assert found(model, kv_cache_dtype="bfloat16") == []
    assert found(model, kv_cache_dtype="bf16") == []
    assert len(found(model, kv_cache_dtype="auto")) == 1


def test_weights_said_to_be_bf16_may_not_be_quantised_when_loaded() -> None:
    weights = {"checkpoint": "/m", "precision": "bf16"}
    model = attached(replicas=[{"name": "a", "url": "http://h", "weights": weights}])
    assert found(model, quantization="fp8") == ["--quantization is fp8, the deployment file says not set"]


def test_a_quantised_checkpoint_may_say_so_itself() -> None:
    assert found(quantization="compressed-tensors") == []


def test_an_engine_that_is_to_give_up_its_memory_must_be_able_to_and_keep_its_weights() -> None:
    looked_after = {"name": "a", "url": "http://h", "managed": {"systemd": "a.service"}}
    weights = {"checkpoint": "/m", "precision": "fp8"}
    released = attached(replicas=[looked_after | {"weights": weights}], serverless={"depth": "released"})
    assert found(released, enable_memory_saver=True, enable_weights_cpu_backup=True) == []
    assert found(released, enable_memory_saver=True) == [
        "--enable-weights-cpu-backup is not set: it would wake without its weights",
    ]
    assert found(released, enable_memory_saver=None, enable_weights_cpu_backup=True) == [
        "--enable-memory-saver is not set: asleep it would keep all its memory",
    ]


class TestPageTags:
    def test_are_asked_for_only_where_they_are_required(self) -> None:
        assert found(metrics=METRICS) == []
        assert found(attached(page_tags=True), metrics=METRICS + ACTIVE) == []

    def test_a_plugin_that_says_nothing_is_not_active(self) -> None:
        [said] = found(attached(page_tags=True))
        assert said.endswith("the plugin is not active")

    def test_every_rank_must_check(self) -> None:
        [said] = found(attached(page_tags=True), metrics=METRICS + ACTIVE + IDLE)
        assert said.endswith("is 0 on 1 of 2 ranks")


def test_each_side_of_a_pair_is_held_to_its_own_role() -> None:
    model = example("glm-5.2.toml")
    pair = model.pairs[0]
    prefill = info(disaggregation_mode="prefill", context_length=131072)
    assert contradictions(model, "prefill", pair.prefill, Reports(prefill, {"loads": [{}]}, METRICS)) == []
    assert contradictions(model, "decode", pair.decode, Reports(prefill, {"loads": [{}]}, METRICS)) == [
        "--disaggregation-mode is prefill, the deployment file says decode"
    ]
