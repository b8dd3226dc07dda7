"""Deployment files: what is read, and that each fault names its key and value."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from backends.round_trips import round_trips_s
from backends.topology import Deployment, DeploymentInvalid, Model, _faults, read_deployment

DIGEST = "sha256:" + "a" * 64
OTHER_DIGEST = "sha256:" + "b" * 64


def replica(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "url": "http://10.0.0.1:30000", "weights": {"checkpoint": "/m", "precision": "bf16"}} | fields


def side(port: int, **weights: Any) -> dict[str, Any]:
    return {"launch": {"port": port}, "weights": {"checkpoint": "/m", "precision": "fp8"} | weights}


def pair(**fields: Any) -> dict[str, Any]:
    return {"name": "p", "prefill": side(30000), "decode": side(30001)} | fields


def model(**fields: Any) -> dict[str, Any]:
    return {
        "id": "@cf/x/y",
        "price": "y",
        "tokenizer": "/m",
        "limits": {"context_tokens": 8192, "output_tokens_max": 4096},
        "kv_cache_dtype": "fp8_e4m3",
        "page_tokens": 64,
        "page_tags": False,
        "replicas": [replica()],
    } | fields


def fault_of(tmp_path: Path, toml: str) -> str:
    (path := tmp_path / "deployment.toml").write_text(toml)
    with pytest.raises(DeploymentInvalid) as caught:
        read_deployment(path)
    return caught.value.message


def toml_of(fields: dict[str, Any]) -> str:
    """A document of one model, in inline tables."""
    return f"models = [{_inline(fields)}]"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


class TestReading:
    def test_a_file_becomes_typed_values(self, tmp_path: Path) -> None:
        (path := tmp_path / "deployment.toml").write_text(toml_of(model(pairs=[pair()])))
        [found] = read_deployment(path).models
        assert found.tokenizer == Path("/m")
        assert [(name, role, engine.base_url) for name, role, engine in found.engines()] == [
            ("a", "unified", "http://10.0.0.1:30000"),
            ("p-prefill", "prefill", "http://127.0.0.1:30000"),
            ("p-decode", "decode", "http://127.0.0.1:30001"),
        ]

    def test_a_model_sleeps_only_if_the_file_says_so(self) -> None:
        assert Model.model_validate(model()).serverless is None
        sleepy = Model.model_validate(model(pairs=[pair()], replicas=[], serverless={"idle_seconds": 60}))
        assert sleepy.serverless is not None
        assert (sleepy.serverless.depth, sleepy.serverless.idle_seconds) == ("stopped", 60)

    @pytest.mark.parametrize("depth", ["stopped", "released"])
    def test_an_attached_engine_may_sleep_where_somebody_looks_after_it(self, depth: str) -> None:
        looked_after = [replica(managed={"systemd": "pagegate-engine@a.service"})]
        assert Model.model_validate(model(replicas=looked_after, serverless={"depth": depth})).serverless is not None

    def test_an_ipv6_engine_has_a_bracketed_url(self) -> None:
        found = Model.model_validate(model(replicas=[replica(url=None, launch={"host": "::1", "port": 5})]))
        assert next(found.engines())[2].base_url == "http://[::1]:5"

    def test_a_model_is_found_by_its_id_and_a_missing_one_lists_the_others(self) -> None:
        deployment = Deployment.model_validate({"models": [model()]})
        assert deployment.model("@cf/x/y").price == "y"
        with pytest.raises(DeploymentInvalid, match="no model z; the file has @cf/x/y"):
            deployment.model("z")


class TestFaults:
    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"page_tokens": 17}, "models[0].page_tokens: 17: "),
            ({"kv_cache_dtype": "auto"}, "models[0].kv_cache_dtype: 'auto': "),
            ({"colour": "red"}, "models[0].colour: is not a key that is known here"),
            ({"replicas": []}, "models[0]: neither replicas nor pairs serve it"),
            ({"replicas": [replica(), replica(url="http://b")]}, "models[0]: the name a stands for two"),
            ({"replicas": [replica(url="ftp://x")]}, "models[0].replicas[0].url: 'ftp://x': "),
            ({"replicas": [replica(launch={"port": 1})]}, "models[0].replicas[0]: exactly one of url and launch"),
            ({"replicas": [replica(name="A b")]}, "models[0].replicas[0].name: 'A b': "),
            (
                {"replicas": [replica(weights={"checkpoint": "/m", "precision": "int3"})]},
                "models[0].replicas[0].weights.precision: 'int3': ",
            ),
            (
                {"limits": {"context_tokens": 10, "output_tokens_max": 11}},
                "models[0].limits: output_tokens_max 11 is over context_tokens 10",
            ),
            ({"price": ""}, "models[0].price: '': "),
            ({"quality": {"agreement": ""}}, "models[0].quality.agreement: '': "),
            (
                {"serverless": {"replicas_min": 2, "depth": "released"}},
                "models[0]: serverless: replicas_min 2 is more than the 1 replicas and pairs that the file names",
            ),
            ({"serverless": {}}, "models[0]: serverless: a is attached to by url, and nobody is named"),
            (
                {"serverless": {"depth": "released"}},
                "models[0]: serverless: a is attached to by url, and nobody is named",
            ),
            (
                {"replicas": [replica(managed={"systemd": "a.timer"})]},
                "models[0].replicas[0].managed.systemd: 'a.timer': ",
            ),
            ({"serverless": {"depth": "deep"}}, "models[0].serverless.depth: 'deep': "),
            (
                {"serverless": {"schedules": [{"from": "8:00", "to": "18:00", "replicas_min": 1}]}},
                "models[0].serverless.schedules[0].from: '8:00': a time is HH:MM",
            ),
        ],
    )
    def test_a_fault_names_its_key_and_value(self, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
        assert fault_of(tmp_path, toml_of(model(**changed))).startswith(said)

    def test_a_missing_key_is_named(self, tmp_path: Path) -> None:
        fields = model()
        del fields["page_tags"]
        assert fault_of(tmp_path, toml_of(fields)) == "models[0].page_tags: Field required"

    def test_an_empty_deployment_is_refused(self, tmp_path: Path) -> None:
        assert fault_of(tmp_path, "models = []") == "the file: it deploys no model"
        assert fault_of(tmp_path, "") == "models: Field required"

    def test_all_faults_are_said_at_once(self, tmp_path: Path) -> None:
        said = fault_of(tmp_path, toml_of(model(page_tokens=3, price=""))).splitlines()
        assert [line.split(":")[0] for line in said] == ["models[0].price", "models[0].page_tokens"]

    @pytest.mark.parametrize("flag", ["--page-size", "--kv-cache-dtype=auto", "--enable-lora"])
    def test_an_extra_flag_can_not_contradict_another_key(self, tmp_path: Path, flag: str) -> None:
        launch = {"port": 30000, "extra": [flag]}
        text = toml_of(model(replicas=[replica(launch=launch) | {"url": "http://a"}]))
        assert f"extra names {flag.partition('=')[0]}" in fault_of(tmp_path, text)

    def test_a_pairs_kv_scales_must_be_the_same(self, tmp_path: Path) -> None:
        unequal = pair(prefill=side(1, kv_scales_digest=DIGEST), decode=side(2, kv_scales_digest=OTHER_DIGEST))
        said = fault_of(tmp_path, toml_of(model(replicas=[], pairs=[unequal])))
        assert said.startswith("models[0].pairs[0]: kv_scales_digest differs")
        assert OTHER_DIGEST in said

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            (
                {"replicas": [replica(url=None, launch={"port": 1}, data_parallel=2)]},
                "models[0].replicas[0]: data_parallel of a launched engine stands in its launch table",
            ),
            (
                {"replicas": [replica(url=None, launch={"port": 1, "program": "local", "data_parallel": 2})]},
                "models[0].replicas[0].launch: data_parallel: the local engine has one rank",
            ),
            (
                {"pairs": [pair(prefill=side(1) | {"launch": {"port": 1, "data_parallel": 3}})]},
                "models[0].pairs[0]: data_parallel is 1 on the decode side, which is no multiple of prefill's 3",
            ),
        ],
    )
    def test_ranks_that_can_not_be_counted_on_are_refused(self, changed: dict[str, Any], said: str) -> None:
        with pytest.raises(ValidationError) as caught:
            Deployment.model_validate({"models": [model(**changed)]})
        assert said in "\n".join(_faults(caught.value))

    def test_two_engines_at_one_address_are_refused(self, tmp_path: Path) -> None:
        said = fault_of(tmp_path, toml_of(model(pairs=[pair(decode=side(30000))])))
        assert said == "the file: two engines are at http://127.0.0.1:30000"

    def test_a_file_that_is_missing_or_no_toml_is_said_in_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(DeploymentInvalid, match="can't be read: No such file"):
            read_deployment(tmp_path / "none.toml")
        assert "is not TOML" in fault_of(tmp_path, "models = [")


def test_a_second_copy_for_decode_is_the_local_engine_s_alone(tmp_path: Path) -> None:
    weights = {"checkpoint": "/m", "precision": "fp8", "decode_precision": "int4"}
    launched = {"name": "a", "weights": weights, "launch": {"program": "local", "port": 30000}}
    (engine,) = Model.model_validate(model(replicas=[launched])).engines()
    assert engine[2].weights.decode_precision == "int4"
    fault = fault_of(tmp_path, toml_of(model(replicas=[{"name": "a", "weights": weights, "launch": {"port": 30000}}])))
    assert "decode_precision" in fault


class TestMachines:
    """Models that share memory: a file that asks for the impossible is refused, with the numbers."""

    def deployed(self, *sizes: float, asleep: bool = True, gpus: int = 0) -> dict[str, Any]:
        models = [
            model(
                id=f"m{number}",
                replicas=[replica(url=None, launch={"port": 30000 + number}, machine="box", memory_gib=size)],
                **({"serverless": {}} if asleep else {}),
            )
            for number, size in enumerate(sizes)
        ]
        return {"models": models, "machines": [{"name": "box", "memory_gib": 8, "gpus": gpus}]}

    def test_models_that_sleep_may_be_larger_together_than_their_machine(self) -> None:
        deployment = Deployment.model_validate(self.deployed(6, 6))
        assert deployment.housed(deployment.models[0]) == {"a": {"box": 6144}}

    def test_an_engine_on_all_gpus_takes_its_size_on_each(self) -> None:
        deployment = Deployment.model_validate(self.deployed(6, gpus=2))
        assert deployment.housed(deployment.models[0]) == {"a": {"box/gpu0": 6144, "box/gpu1": 6144}}

    def test_one_that_is_larger_than_its_machine_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="a of m0 takes 9 GiB, and box has 8 GiB"):
            Deployment.model_validate(self.deployed(9))

    def test_models_that_never_sleep_have_to_fit_side_by_side(self) -> None:
        with pytest.raises(ValidationError, match="a of m0 takes 5 GiB beside 4 GiB of what never sleeps, and box has"):
            Deployment.model_validate(self.deployed(5, 4, asleep=False))

    def test_what_never_sleeps_leaves_too_little_for_one_that_does(self) -> None:
        fields = self.deployed(5, 4)
        del fields["models"][0]["serverless"]
        with pytest.raises(ValidationError, match="a of m1 takes 4 GiB beside 5 GiB of what never sleeps"):
            Deployment.model_validate(fields)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"machine": "elsewhere"}, "the machine elsewhere, which"),
            ({"memory_gib": None}, "machine and memory_gib go together"),
            ({"launch": {"port": 1, "gpus": [2]}}, "GPU 2 is not on the machine box, which has 0"),
        ],
    )
    def test_a_place_that_is_none_is_refused(self, change: dict[str, Any], said: str) -> None:
        fields = self.deployed(4)
        fields["models"][0]["replicas"][0] |= change
        with pytest.raises(ValidationError, match=said):
            Deployment.model_validate(fields)


class TestRegions:
    def test_each_replica_and_pair_says_where_it_is_and_what_is_left_out_is_where_the_gateway_is(
        self, tmp_path: Path
    ) -> None:
        (path := tmp_path / "d.toml").write_text(
            toml_of(model(replicas=[replica(), replica(name="b", url="http://b:1", region="us-east")]))
            + '\nround_trips = [{between = ["us-east", "eu-west"], milliseconds = 80}]'
        )
        deployment = read_deployment(path)
        assert [one.region for one in deployment.models[0].replicas] == [None, "us-east"]
        assert round_trips_s(deployment.round_trips, "eu-west") == {"us-east": 0.08}
        assert round_trips_s(deployment.round_trips, "us-east") == {"eu-west": 0.08}
        assert round_trips_s(deployment.round_trips, "eu-north") == {}

    @pytest.mark.parametrize(
        ("trips", "says"),
        [
            ('{between = ["a", "a"], milliseconds = 1}', "round_trips[0]: between names a twice"),
            ('{between = ["a", "B"], milliseconds = 1}', "round_trips[0].between[1]: 'B'"),
            ('{between = ["a", "b"], milliseconds = 0}', "round_trips[0].milliseconds: 0"),
            (
                '{between = ["a", "b"], milliseconds = 1}, {between = ["b", "a"], milliseconds = 2}',
                "the round trip between b and a is listed twice",
            ),
            ('{between = ["b", "c"], milliseconds = 1}', "no replica or pair is in b or c"),
        ],
    )
    def test_a_round_trip_lies_between_two_regions_once(self, tmp_path: Path, trips: str, says: str) -> None:
        assert says in fault_of(tmp_path, f"{toml_of(model(replicas=[replica(region='a')]))}\nround_trips = [{trips}]")


class TestRevisions:
    """A model with a new revision beside the old one."""

    def two(self, *revisions: str, **rollout: Any) -> Model:
        replicas = [
            replica(name=f"r{number}", url=f"http://10.0.0.{number}", revision=revision)
            for number, revision in enumerate(revisions)
        ]
        table = {"rollout": {"revision": "int4", "share_percent": 10} | rollout} if rollout != {"no": True} else {}
        return Model.model_validate(model(replicas=replicas, **table))

    def test_each_is_the_model_with_its_own_engines(self) -> None:
        found = self.two("stable", "int4", "int4")
        assert (found.revisions, found.old_revision) == (("stable", "int4"), "stable")
        assert [one.name for one in found.of_revision("int4").replicas] == ["r1", "r2"]

    @pytest.mark.parametrize(
        ("revisions", "rollout", "said"),
        [
            (("stable", "int4"), {"no": True}, "the revisions stable, int4, and no rollout says how they share"),
            (("stable", "fp8"), {}, "no replica or pair is of the revision int4"),
            (("int4", "int4"), {}, "it is between two revisions, and the file has int4"),
            (("stable", "int4"), {"share_percent": 101}, "less than or equal to 100"),
        ],
    )
    def test_revisions_that_nobody_could_share_are_refused(
        self, revisions: tuple[str, ...], rollout: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ValidationError, match=said):
            self.two(*revisions, **rollout)
