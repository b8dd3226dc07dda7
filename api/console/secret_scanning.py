"""POST /console/v1/secret_scanning: a scanner of public code tells of keys that it found; they are revoked at once.

Who speaks is known by an ECDSA signature (P-256, SHA-256) over the body's bytes, under a public key that the operator
put into a file: the form is that of GitHub's partner programme, headers and key file included. The answer tells which
findings were keys, by the hash of their text.
"""

import base64
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import orjson
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from pydantic import BaseModel, Field, RootModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api.body import input_invalid, read_body
from api.errors import RouteUnknown, SignatureInvalid
from api.services import Services
from tenancy.leaked_keys import Finding, revoke_leaked
from tenancy.pepper import open_pepper

_FINDINGS_MAX: Final = 1_000
_SIGNATURE_CHARACTERS_MAX: Final = 200
_KEYS_MAX: Final = 20


class FindingBody(BaseModel):
    """Other fields are the scanner's own affair."""

    token: Annotated[str, Field(max_length=1_000)]
    type: Annotated[str, Field(max_length=200)] = ""
    url: Annotated[str | None, Field(max_length=5_000)] = None


class _KnownKey(BaseModel):
    key_identifier: Annotated[str, Field(min_length=1, max_length=200)]
    key: str


class _KnownKeys(BaseModel):
    """As GitHub publishes them: old ones stay until nothing is signed with them any more."""

    public_keys: Annotated[list[_KnownKey], Field(max_length=_KEYS_MAX)]


class FindingsBody(RootModel[Annotated[list[FindingBody], Field(max_length=_FINDINGS_MAX)]]):
    """A report."""


class SecretScanningRoute:
    """keys: those of the file that the setting names, read at start; without it there is no such route."""

    def __init__(self, services: Services) -> None:
        self._services = services
        path = services.settings.tenancy.secret_scanning_keys
        self._keys = {} if path is None else read_public_keys(path)

    async def report(self, request: Request) -> Response:
        """Which findings were keys of this service. Each of these is revoked; telling twice changes nothing."""
        if not self._keys:
            raise RouteUnknown
        body = await read_body(request)
        self._check(request.headers, body)
        try:
            told = FindingsBody.model_validate_json(body).root
        except ValidationError as error:
            raise input_invalid(error) from None
        findings = [Finding(one.token, one.url or "") for one in told]
        true = await self._services.database.call(self._revoke, findings)
        answer = [
            {
                "token_hash": base64.b64encode(hashlib.sha256(one.token.encode()).digest()).decode(),
                "token_type": one.type,
                "label": "true_positive" if known else "false_positive",
            }
            for one, known in zip(told, true, strict=True)
        ]
        return Response(orjson.dumps(answer), media_type="application/json")

    def _revoke(self, findings: list[Finding]) -> list[bool]:
        pepper = open_pepper(self._services.settings.pepper_path)
        return revoke_leaked(self._services.database, pepper, findings, clock=time.time_ns)

    def _check(self, headers: Mapping[str, str], body: bytes) -> None:
        """Raises SignatureInvalid."""
        key = self._keys.get(headers.get("github-public-key-identifier", ""))
        signature = headers.get("github-public-key-signature", "")
        if key is None or not 0 < len(signature) <= _SIGNATURE_CHARACTERS_MAX:
            raise SignatureInvalid
        try:
            key.verify(base64.b64decode(signature, validate=True), body, ec.ECDSA(SHA256()))
        except (InvalidSignature, ValueError):
            raise SignatureInvalid from None


def read_public_keys(path: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """By identifier. Raises ValueError for a file or a key that can't be used, OSError if it can't be read."""
    keys: dict[str, ec.EllipticCurvePublicKey] = {}
    for known in _KnownKeys.model_validate_json(path.read_bytes()).public_keys:
        key = load_pem_public_key(known.key.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError(f"The key {known.key_identifier} in {path} is no ECDSA key on the curve P-256.")  # noqa: TRY004 - a value of a file
        keys[known.key_identifier] = key
    return keys
