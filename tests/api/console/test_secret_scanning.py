"""A scanner's report: believed by its signature alone, and then its keys are revoked and the audit log says so."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256

from api.console.secret_scanning import read_public_keys
from tenancy import provisioning
from tenancy.keys import KeyKind, new_key_text
from tenancy.pepper import open_pepper
from tests.api.console.administered import Administered, administered
from tests.api.exchange import Exchange, call

_PATH = "/console/v1/secret_scanning"
_URL = "https://github.com/acme/app/blob/main/settings.py"


def _pem(key: PublicKeyTypes) -> str:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


def _file(path: Path, **keys: PublicKeyTypes) -> Path:
    listed = [{"key_identifier": name, "key": _pem(key), "is_current": True} for name, key in keys.items()]
    path.write_text(json.dumps({"public_keys": listed}))
    return path


@dataclass
class Scanner:
    """world: two accounts behind a service that knows the scanner's keys, by the names `old` and `new`."""

    world: Administered
    keys: dict[str, ec.EllipticCurvePrivateKey]

    async def report(self, body: object, *, named: str = "new", signed_by: str = "new", **more: str) -> Exchange:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        signature = base64.b64encode(self.keys[signed_by].sign(raw, ec.ECDSA(SHA256()))).decode()
        headers = {"github-public-key-identifier": named, "github-public-key-signature": signature} | more
        return await call(self.world.app, "POST", _PATH, body=raw, key=None, headers=headers)

    async def works(self) -> bool:
        return (await self.world.ask("GET", "/keys")).status == 200


@pytest.fixture
def scanner(tmp_path: Path) -> Iterator[Scanner]:
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("old", "new")}
    path = _file(tmp_path / "keys.json", **{name: key.public_key() for name, key in keys.items()})
    with administered(tmp_path, tenancy={"secret_scanning_keys": str(path)}) as world:
        yield Scanner(world, keys | {"foreign": ec.generate_private_key(ec.SECP256R1())})


@pytest.mark.parametrize("name", ["old", "new"])
async def test_a_key_that_was_found_is_revoked_and_the_audit_log_says_where(
    scanner: Scanner, tmp_path: Path, name: str
) -> None:
    text, unknown = scanner.world.admin.text, new_key_text(KeyKind.INFERENCE)
    assert await scanner.works()
    found = [{"token": one, "type": "pagegate", "url": f"{_URL}?{text}"} for one in (text, unknown, "ghp_other")]
    answer = await scanner.report(found, named=name, signed_by=name)
    labels = ["true_positive", "false_positive", "false_positive"]
    hashes = [base64.b64encode(hashlib.sha256(one["token"].encode()).digest()).decode() for one in found]
    assert answer.status == 200
    assert answer.json == [
        {"token_hash": of, "token_type": "pagegate", "label": label} for of, label in zip(hashes, labels, strict=True)
    ]
    assert text.encode() not in answer.body
    assert not await scanner.works()
    again = await scanner.report(found, named=name, signed_by=name)
    assert [one["label"] for one in again.json] == labels
    world = scanner.world
    pepper = open_pepper(tmp_path / "pepper")
    other = provisioning.issue_key(
        world.database, pepper, world.account_id, name="b", kind=KeyKind.ADMIN, clock=time.time_ns
    )
    entries = (await world.ask("GET", "/audit", key=other.text)).json["entries"]
    (entry,) = [one for one in entries if one["action"] == "key.revoke"]
    assert (entry["actor"]["kind"], entry["detail"]["reason"]) == ("service", "found by a secret scanner")
    assert entry["detail"]["found_at"].startswith(_URL)
    assert text not in json.dumps(entries)


@pytest.mark.parametrize(
    ("named", "signed_by", "more"),
    [
        ("new", "foreign", {}),
        ("unheard-of", "new", {}),
        ("old", "new", {}),
        ("new", "new", {"github-public-key-signature": ""}),
        ("new", "new", {"github-public-key-signature": "no base64!"}),
        ("new", "new", {"github-public-key-signature": "A" * 10_000}),
    ],
)
async def test_nobody_else_is_believed(scanner: Scanner, named: str, signed_by: str, more: dict[str, str]) -> None:
    body = [{"token": scanner.world.admin.text, "type": "pagegate", "url": _URL}]
    answer = await scanner.report(body, named=named, signed_by=signed_by, **more)
    assert (answer.status, answer.json["code"]) == (401, "invalid_signature")
    assert await scanner.works()


async def test_a_body_that_was_changed_after_it_was_signed_is_not_believed(scanner: Scanner) -> None:
    signature = base64.b64encode(scanner.keys["new"].sign(b"[]", ec.ECDSA(SHA256()))).decode()
    body = [{"token": scanner.world.admin.text, "type": "", "url": ""}]
    answer = await scanner.report(body, **{"github-public-key-signature": signature})
    assert answer.status == 401
    assert await scanner.works()


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"null", [{"type": "x"}], [{"token": "x" * 1_001}], [{"token": "x"}] * 1_001, [["token"]]],
)
async def test_what_is_no_report_is_refused(scanner: Scanner, body: Any) -> None:
    assert (await scanner.report(body)).status == 400


async def test_without_keys_there_is_no_such_route(tmp_path: Path) -> None:
    with administered(tmp_path) as world:
        answer = await call(world.app, "POST", _PATH, body=b"[]", key=None)
        assert (answer.status, answer.json["code"]) == (404, "unknown_route")


def test_keys_of_another_kind_are_refused_at_start(tmp_path: Path) -> None:
    others: list[PublicKeyTypes] = [
        ec.generate_private_key(ec.SECP384R1()).public_key(),
        rsa.generate_private_key(65_537, 2_048).public_key(),
    ]
    for key in others:
        with pytest.raises(ValueError, match="P-256"):
            read_public_keys(_file(tmp_path / "keys.json", other=key))
