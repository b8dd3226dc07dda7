"""`pagegate config check` never prints a password."""

import pytest

from tests.api.cli.conftest import Pagegate


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_passwords_of_servers_are_left_out(
    pagegate: Pagegate, monkeypatch: pytest.MonkeyPatch, as_json: list[str]
) -> None:
    monkeypatch.setenv("PAGEGATE_DATABASE_URL", "postgresql+psycopg://pg:canary-one@db/pagegate")
    monkeypatch.setenv("PAGEGATE_METERS_URL", "redis://:canary-two@meters:6379/0")
    code, out, err = pagegate("config", "check", *as_json)
    assert code == 0, err
    assert "meters:6379" in out
    assert "canary" not in out + err
