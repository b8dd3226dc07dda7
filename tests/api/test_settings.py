"""Settings: where they come from, and that nothing malformed is taken silently."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from api.settings import Settings, SettingsInvalid, keep_tokenizers_single_threaded, load_settings


def load(tmp_path: Path, **variables: str) -> Settings:
    return load_settings({"HOME": str(tmp_path), "PAGEGATE_HOME": str(tmp_path / "home")} | variables)


def test_defaults_need_nothing_but_a_home(tmp_path: Path) -> None:
    settings = load(tmp_path)
    assert (settings.host, settings.port) == ("127.0.0.1", 8787)
    assert settings.database_url == f"sqlite:///{tmp_path}/home/pagegate.db"
    assert settings.backends.url is None


def test_variables_reach_nested_settings(tmp_path: Path) -> None:
    settings = load(
        tmp_path, PAGEGATE_PORT="9000", PAGEGATE_GATEWAY__QUEUE_ENTRIES_MAX="3", PAGEGATE_ENGINE__URL="http://e"
    )
    assert (settings.port, settings.gateway.queue_entries_max, settings.backends.url) == (9000, 3, "http://e")


@pytest.mark.parametrize(
    ("variable", "key", "networks"),
    [
        ("PAGEGATE_TRUSTED_PROXIES", "trusted_proxies", lambda settings: settings.trusted_proxies),
        (
            "PAGEGATE_BILLING__WEBHOOK_NETWORKS",
            "billing.webhook_networks",
            lambda settings: settings.billing.webhook_networks,
        ),
    ],
)
def test_networks_are_a_list_in_a_file_and_comma_separated_in_a_variable(
    tmp_path: Path, variable: str, key: str, networks: Callable[[Settings], tuple[object, ...]]
) -> None:
    file = tmp_path / "pagegate.toml"
    file.write_text(f'{key} = ["10.0.0.0/8", "fd00::/8"]\n')
    listed = networks(load(tmp_path, PAGEGATE_CONFIG=str(file)))
    assert networks(load(tmp_path, **{variable: "10.0.0.0/8, fd00::/8"})) == listed
    assert [str(network) for network in listed] == ["10.0.0.0/8", "fd00::/8"]
    assert networks(load(tmp_path)) == ()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@h:6379/0",
        "rediss://h",
        "unix:///run/valkey.sock",
        "redis+sentinel://:secret@h1:26379,h2:26379/limits",
        "rediss+cluster://h1:6379,h2:6379",
        "",
    ],
)
def test_shared_meters_have_a_url_of_their_servers_kind(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, PAGEGATE_METERS_URL=url).meters_url == url


@pytest.mark.parametrize("url", ["redis+sentinel://h:26379", "http://h", "redis://"])
def test_a_url_that_says_too_little_stops_the_start(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingsInvalid, match="PAGEGATE_METERS_URL"):
        load(tmp_path, PAGEGATE_METERS_URL=url)


def test_a_variable_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "pagegate.toml"
    file.write_text("port = 9001\n[gateway]\nqueue_entries_max = 5\nqueue_wait_seconds_max = 7.5\n")
    settings = load(tmp_path, PAGEGATE_CONFIG=str(file), PAGEGATE_GATEWAY__QUEUE_ENTRIES_MAX="6")
    assert (settings.port, settings.gateway.queue_entries_max) == (9001, 6)
    assert settings.gateway.queue_wait_seconds_max == 7.5


def test_the_file_of_the_data_folder_is_read_without_being_named(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "pagegate.toml").write_text("port = 9002\n")
    assert load(tmp_path).port == 9002


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PAGEGATE_PROT", "1"),
        ("PAGEGATE_PORT", "eighty"),
        ("PAGEGATE_PORT", "70000"),
        ("PAGEGATE_GATEWAY__QUEUE_ENTRIES", "1"),
        ("PAGEGATE_BILLING__DRAIN_INTERVAL_S", "-1"),
        ("PAGEGATE_DRAIN_SECONDS_MAX", "inf"),
        ("PAGEGATE_GATEWAY__POLL_INTERVAL_IDLE_S", "inf"),
        ("PAGEGATE_BATCHES__LEASE_SECONDS", "nan"),
        ("PAGEGATE_LOG_FORMAT", "xml"),
        ("PAGEGATE_METERS_URL", "http://elsewhere"),
        ("PAGEGATE_TRUSTED_PROXIES", "10.0.0.1/8"),
        ("PAGEGATE_TENANCY__METERS_PROCESSES", "0"),
    ],
)
def test_an_unknown_or_malformed_variable_stops_the_start_and_is_named(
    tmp_path: Path, variable: str, value: str
) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        load(tmp_path, **{variable: value})
    assert variable in str(refused.value)


def test_a_broken_or_missing_file_is_said_in_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 1")
    with pytest.raises(SettingsInvalid, match="is not TOML"):
        load(tmp_path, PAGEGATE_CONFIG=str(broken))
    broken.write_bytes(b'host = "\xff"')
    with pytest.raises(SettingsInvalid, match="is not TOML"):
        load(tmp_path, PAGEGATE_CONFIG=str(broken))
    with pytest.raises(SettingsInvalid, match="can't be read"):
        load(tmp_path, PAGEGATE_CONFIG=str(tmp_path / "missing.toml"))


def test_every_setting_says_what_it_is() -> None:
    undescribed = [
        f"{model}.{name}"
        for model in (Settings, *(Settings.model_fields[part].annotation for part in ("backends", "gateway")))
        for name, field in model.model_fields.items()  # type: ignore[union-attr]  # nested models
        if not field.description and name not in ("backends", "gateway", "lifecycle", "tenancy", "billing", "batches")
    ]
    assert undescribed == []


def test_tokenizers_start_no_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    keep_tokenizers_single_threaded()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"  # noqa: TID251 - what the library reads


SHARED = {
    "PAGEGATE_WORKERS": "4",
    "PAGEGATE_DATABASE_URL": "postgresql+psycopg://h/d",
    "PAGEGATE_METERS_URL": "redis://h",
    "PAGEGATE_PAGES_URL": "redis://h",
}


@pytest.mark.parametrize("name", ["PAGEGATE_DATABASE_URL", "PAGEGATE_METERS_URL", "PAGEGATE_PAGES_URL"])
def test_several_workers_without_what_they_must_share_are_refused_by_the_settings_name(
    tmp_path: Path, name: str
) -> None:
    assert load(tmp_path, **SHARED).sharers == 4
    rest = {other: value for other, value in SHARED.items() if other != name}
    with pytest.raises(SettingsInvalid, match=f"PAGEGATE_WORKERS is 4, but .*{name}") as refusal:
        load(tmp_path, **rest)
    assert str(refusal.value).count("PAGEGATE_") == 2, "no other setting is to blame"


def test_processes_that_share_are_those_of_all_machines(tmp_path: Path) -> None:
    assert load(tmp_path).sharers == 1
    assert load(tmp_path, **SHARED, PAGEGATE_TENANCY__METERS_PROCESSES="12").sharers == 12
    with pytest.raises(SettingsInvalid, match="PAGEGATE_TENANCY__METERS_PROCESSES counts the workers of all machines"):
        load(tmp_path, **SHARED, PAGEGATE_TENANCY__METERS_PROCESSES="3")
