"""Where a webhook may go: https, and an address of the public Internet or of a network that the operator allows.

Tenants choose the URLs, so the service must not be led to its own machines: a name is resolved for each connection, and
the connection goes to the address that was looked at, so that it can't change in between.
"""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from billing.errors import WebhookInvalid

_URL_CHARACTERS_MAX = 2_000

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# What is public in IPv6; the library calls more than that global.
_UNICAST = ipaddress.IPv6Network("2000::/3")
# Of translators to IPv4 (RFC 6052), which lead to private networks as well.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowedAddresses:
    """networks: private ones that are allowed too."""

    networks: tuple[Network, ...] = ()

    def allows(self, address: str) -> bool:
        reached = _reached(ipaddress.ip_address(address))
        if any(reached in network for network in self.networks if network.version == reached.version):
            return True
        if isinstance(reached, ipaddress.IPv6Address) and reached not in _UNICAST:
            return False
        return reached.is_global and not reached.is_multicast


def _reached(found: Address) -> Address:
    """The IPv4 address that an IPv6 address carries, where whoever passes it on takes it for that one."""
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found in _NAT64:
        return ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
    return found.ipv4_mapped or found.sixtofour or found


def check_url(text: str, allowed: AllowedAddresses) -> str:
    """The URL as it will be called. Raises WebhookInvalid; a name is only looked at when it is called."""
    try:
        url = URL(text)
    except ValueError as error:
        raise WebhookInvalid(f"This is not a URL: {error}.") from error
    if not text.isprintable() or " " in text:
        raise WebhookInvalid("A webhook's URL has no spaces and no control characters.")
    if url.scheme != "https" or not url.host:
        raise WebhookInvalid("A webhook's URL begins with https:// and names a host.")
    if url.user is not None or url.password is not None or url.fragment:
        raise WebhookInvalid("A webhook's URL has no user, password or fragment.")
    if len(str(url)) > _URL_CHARACTERS_MAX:
        raise WebhookInvalid(f"A webhook's URL has at most {_URL_CHARACTERS_MAX} characters.")
    if _is_address(url.host) and not allowed.allows(url.host):
        raise WebhookInvalid("A webhook can't go to a private address.")
    return str(url)


class GuardedResolver(AbstractResolver):
    """Resolves names for aiohttp's connector, and refuses those that lead to an address that is not allowed."""

    def __init__(self, allowed: AllowedAddresses) -> None:
        self._allowed = allowed
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises OSError, as an unknown name does, if any of the addresses is not allowed."""
        found = await self._resolver.resolve(host, port, family)
        _check(host, [result["host"] for result in found], self._allowed)
        return found

    async def close(self) -> None:
        await self._resolver.close()


def check_literal(url: str, allowed: AllowedAddresses) -> None:
    """An address in the URL itself is never resolved: look at it before each call. Raises OSError."""
    host = URL(url).host or ""
    if _is_address(host):
        _check(host, [host], allowed)


def _check(host: str, addresses: Sequence[str], allowed: AllowedAddresses) -> None:
    if not all(allowed.allows(address) for address in addresses):
        raise OSError(f"{host} leads to an address that webhooks may not go to")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
