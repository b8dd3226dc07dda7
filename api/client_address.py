"""Where a request comes from: the right-most hop that no trusted proxy vouches for. Used by auth.py and dashboard/.

Each proxy appends to X-Forwarded-For whom it saw, so the list is read from the right, as long as those who wrote it are
trusted. What stands further left was written by strangers.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.types import Scope

from tenancy.principal import Address, Network


def client_address(scope: Scope, trusted: Iterable[Network]) -> Address | None:
    """None if the peer has no address (a Unix socket) or a trusted proxy wrote something that is none."""
    peer = scope.get("client")
    address = _address(peer[0]) if peer else None
    trusted = tuple(trusted)
    hops = [hop.strip() for value in _forwarded(scope) for hop in value.split(",")]
    while address is not None and hops and any(address in network for network in trusted):
        address = _address(hops.pop())
    return address


def _forwarded(scope: Scope) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]


def _address(text: str) -> Address | None:
    try:
        address: IPv4Address | IPv6Address = ip_address(text)
    except ValueError:
        return None
    # A dual-stack socket shows IPv4 peers as ::ffff:192.0.2.1.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def comes_through_trusted_proxy(scope: Scope, trusted: Iterable[Network]) -> bool:
    """Whether the peer itself is a proxy whose headers are believed."""
    peer = scope.get("client")
    address = _address(peer[0]) if peer else None
    return address is not None and any(address in network for network in trusted)
