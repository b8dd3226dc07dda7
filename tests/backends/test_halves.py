"""Groups in a deployment file: several of each half, how each is named, launched and told of the others, and faults."""

from pathlib import Path
from typing import Any

import pytest

from backends.sglang.launch import engine_commands
from backends.topology import Model, read_deployment
from tests.backends.test_topology import DIGEST, fault_of, model, pair, side, toml_of


def half(name: str, port: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "launch": {"port": port}, "weights": {"checkpoint": "/m", "precision": "fp8"}} | fields


def group(**fields: Any) -> dict[str, Any]:
    prefill = [half("pa", 30000), half("pb", 30001, bootstrap_port=8999)]
    return {"prefill": prefill, "decode": [half("da", 30010), half("db", 30011), half("dc", 30012)]} | fields


def grouped(**fields: Any) -> dict[str, Any]:
    return model(replicas=[], groups=[group(**fields)])


def test_each_half_is_an_engine_and_a_unit_of_its_own_name(tmp_path: Path) -> None:
    (path := tmp_path / "deployment.toml").write_text(toml_of(grouped()))
    [found] = read_deployment(path).models
    names = ["pa", "pb", "da", "db", "dc"]
    assert [(name, role) for name, role, _ in found.engines()] == list(
        zip(names, ["prefill"] * 2 + ["decode"] * 3, strict=True)
    )
    assert [(name, len(engines)) for name, engines in found.units()] == [(name, 1) for name in names]
    [sides] = found.sides()
    assert [one.bootstrap for one in sides.prefill] == [("127.0.0.1", 8998), ("127.0.0.1", 8999)]
    assert [one.bootstrap for one in sides.decode] == [None] * 3


def test_a_pair_is_a_group_of_one_and_one_that_is_one_unit() -> None:
    found = Model.model_validate(model(replicas=[], pairs=[pair()]))
    [sides] = found.sides()
    [(prefill,), (decode,)] = sides.prefill, sides.decode
    assert (prefill.name, prefill.unit, prefill.bootstrap) == ("p-prefill", "p", ("127.0.0.1", 8998))
    assert (decode.name, decode.unit, decode.bootstrap) == ("p-decode", "p", None)


@pytest.mark.parametrize("program", ["sglang", "local"])
def test_a_half_is_started_as_its_side_and_prefill_is_told_where_it_is_asked(program: str) -> None:
    fields = grouped()
    for halves in fields["groups"][0].values():
        for one in halves:
            one["launch"]["program"] = program
    told = {found.name: " ".join(found.argv) for found in engine_commands(Model.model_validate(fields))}
    as_side = "--disaggregation-mode {}" if program == "sglang" else "--role {}"
    assert as_side.format("prefill") in told["pb"]
    assert "--disaggregation-bootstrap-port 8999" in told["pb"]
    assert as_side.format("decode") in told["db"]
    assert "--disaggregation-bootstrap-port" not in told["db"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefill": []}, "models[0].groups[0].prefill: []: Tuple should have at least 1 item"),
        (
            {"prefill": [half("pa", 30000), half("pb", 30001)]},
            "models[0].groups[0]: bootstrap_port: pa and pb are both at 127.0.0.1:8998",
        ),
        (
            {"decode": [half("da", 30010), half("db", 30011, weights={"checkpoint": "/m4", "precision": "int4"})]},
            "models[0].groups[0]: weights differ between da and db on the decode side",
        ),
        (
            {
                "decode": [
                    half("d", 1, weights={"checkpoint": "/m", "precision": "fp8", "kv_scales_digest": DIGEST}),
                ]
            },
            "models[0].groups[0]: kv_scales_digest differs: prefill has None",
        ),
        (
            {"prefill": [half("pa", 1) | {"launch": {"port": 1, "data_parallel": 2}}]},
            "models[0].groups[0]: data_parallel is 1 on the decode side, which is no multiple of prefill's 2",
        ),
        ({"decode": [half("pa", 30010)]}, "models[0]: the name pa stands for two replicas or pairs"),
        ({"decode": [half("da", 30000)]}, "two engines are at http://127.0.0.1:30000"),
    ],
)
def test_a_fault_of_a_group_names_its_halves(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in fault_of(tmp_path, toml_of(grouped(**fields)))


SLEEPS = {"idle_seconds": 60}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"groups": [group(), group()]}, "a group whose halves sleep serves its model alone"),
        ({"pairs": [pair(prefill=side(1), decode=side(2))]}, "a group whose halves sleep serves its model alone"),
        (
            {"groups": [group(decode=[half("d", 1, machine="box", memory_gib=1)])]},
            "the halves of a group share no machine with others that sleep",
        ),
        (
            {"serverless": SLEEPS | {"replicas_min": 3}},
            "serverless: replicas_min 3 is more than the 2 replicas and pairs that the file names",
        ),
    ],
)
def test_what_a_group_that_sleeps_can_not_be(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    deployed = model(replicas=[], groups=[group()], serverless=SLEEPS) | fields
    assert said in fault_of(tmp_path, toml_of(deployed))
