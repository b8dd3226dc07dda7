"""Webhooks go to the public Internet over https, and to private networks only where the operator allows them."""

import ipaddress

import pytest

from billing.errors import WebhookInvalid
from billing.webhooks.addresses import AllowedAddresses, GuardedResolver, check_literal, check_url

PUBLIC = AllowedAddresses()
PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("::1", "::", "fe80::1", "fd00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *(
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::a00:1",
        "64:ff9b:1::a00:1",
        "2002:a00:1::1",
        "::7f00:1",
        "::ffff:0:a00:1",
        "fec0::1",
    ),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_not_allowed(address: str) -> None:
    assert not PUBLIC.allows(address)
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(WebhookInvalid, match="private address"):
        check_url(f"https://{host}/hook", PUBLIC)
    with pytest.raises(OSError, match="may not go to"):
        check_literal(f"https://{host}/hook", PUBLIC)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::1"]
)
def test_a_public_address_is_allowed(address: str) -> None:
    assert PUBLIC.allows(address)


def test_a_private_network_that_the_operator_names_is_allowed() -> None:
    allowed = AllowedAddresses((ipaddress.ip_network("10.0.0.0/8"),))
    assert check_url("https://10.1.2.3/hook", allowed) == "https://10.1.2.3/hook"
    assert allowed.allows("::ffff:10.0.0.1")
    assert allowed.allows("64:ff9b::a00:1")
    assert not allowed.allows("192.168.1.1")


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.com/", "ftp://example.com/", "https://", "https:///path", "example.com/hook", ""),
        *("https://exa mple.com/", "https://example.com/a b", "https://example.com/\n", "https://exam\u202eple.com/"),
        *(
            "https://user:pass@example.com/",
            "https://example.com/#fragment",
            "https://[::1",
            "https://x/" + "a" * 2_000,
        ),
    ],
)
def test_a_url_that_is_none_of_ours_is_refused(url: str) -> None:
    with pytest.raises(WebhookInvalid):
        check_url(url, PUBLIC)


async def test_a_name_that_leads_to_this_machine_is_refused_when_it_is_called() -> None:
    assert check_url("https://localhost/hook", PUBLIC)
    resolver = GuardedResolver(PUBLIC)
    with pytest.raises(OSError, match="may not go to"):
        await resolver.resolve("localhost", 443)
    await resolver.close()
