"""Whom a request comes from, behind proxies that are trusted and others."""

from ipaddress import ip_network

import pytest

from api.client_address import client_address

PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def address(peer: str | None, *forwarded: str) -> str | None:
    scope = {
        "client": None if peer is None else (peer, 1234),
        "headers": [(b"x-forwarded-for", value.encode()) for value in forwarded],
    }
    found = client_address(scope, PROXIES)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # nobody trusted says so
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9, 198.51.100.7"], "198.51.100.7"),  # the left one was the client's own idea
        ("10.0.0.1", ["203.0.113.9, 198.51.100.7, 10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9", "198.51.100.7"], "198.51.100.7"),  # a second header was appended later
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.2, 10.0.0.3"], "10.0.0.2"),
        ("10.0.0.1", ["nonsense"], None),
        ("10.0.0.1", [""], None),
        ("fd00::1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["::ffff:192.0.2.1"], "192.0.2.1"),
        (None, ["192.0.2.1"], None),
        ("/run/socket", [], None),
    ],
)
def test_the_right_most_untrusted_hop_is_the_client(peer: str | None, forwarded: list[str], expected: str) -> None:
    assert address(peer, *forwarded) == expected
