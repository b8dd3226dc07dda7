"""Who added and removed an endpoint is in the audit log, and nothing of its address that may be a secret."""

from billing.webhooks.addresses import AllowedAddresses
from billing.webhooks.endpoints import Endpoints
from tenancy.audit_log import Actor, ActorKind, read_audit_log
from tenancy.database import Database
from tests.billing.builders import ACCOUNT
from tests.tenancy.clock import SettableClock


def test_changes_are_in_the_audit_log_without_secrets(database: Database, clock: SettableClock) -> None:
    endpoints = Endpoints(database, allowed=AllowedAddresses(), clock=clock)
    key = Actor(ActorKind.KEY, "k" * 32)
    added = endpoints.add(ACCOUNT, "https://hooks.example.com/T0KEN?s=S3CRET", by=key)
    endpoints.remove(ACCOUNT, added.endpoint.id, by=key)
    entries = read_audit_log(database, ACCOUNT)
    assert [(entry.action, entry.subject, entry.actor_id) for entry in entries] == [
        ("webhook.remove", added.endpoint.id, key.id),
        ("webhook.add", added.endpoint.id, key.id),
    ]
    assert entries[1].detail == '{"host":"hooks.example.com"}'
    assert not any(secret in str(entries) for secret in ("T0KEN", "S3CRET", added.secret))
