"""What names, lists and limits may be: who provisions something gets it checked here first. Pure."""

import re
from collections.abc import Iterable
from ipaddress import ip_network

from tenancy.accounts import NAME_CHARACTERS_MAX
from tenancy.principal import Network

LIST_MAX = 100
REGION_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
MODEL_ID = re.compile(r"[!-~]{1,200}", re.ASCII)


class ProvisioningInvalid(ValueError):
    """A name, limit, scope or expiry that can't be; the message says which and why."""


def check_name(name: str) -> None:
    """Raises ProvisioningInvalid. Accounts, keys and projects are named alike."""
    if not name.strip() or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise ProvisioningInvalid(f"A name is one line of 1 to {NAME_CHARACTERS_MAX} printable characters.")


def check_models(models: Iterable[str]) -> tuple[str, ...]:
    """Each once. Raises ProvisioningInvalid. Whether it is served now does not matter: lists outlive deployments."""
    found = tuple(dict.fromkeys(models))
    if not 1 <= len(found) <= LIST_MAX:
        raise ProvisioningInvalid(f"A list of models has 1 to {LIST_MAX} entries.")
    for model in found:
        if MODEL_ID.fullmatch(model) is None:
            raise ProvisioningInvalid("A model's id has 1 to 200 characters, without spaces.")
    return found


def check_regions(regions: Iterable[str]) -> tuple[str, ...]:
    """Each once, in order of their names. Raises ProvisioningInvalid."""
    found = tuple(sorted(set(regions)))
    if not 1 <= len(found) <= LIST_MAX:
        raise ProvisioningInvalid(f"A list of regions has 1 to {LIST_MAX} entries.")
    for region in found:
        if REGION_NAME.fullmatch(region) is None:
            raise ProvisioningInvalid(f"{region!r} is no name of a region: a-z, 0-9 and hyphens, at most 63.")
    return found


def check_networks(networks: Iterable[str]) -> tuple[Network, ...]:
    """Each once. Raises ProvisioningInvalid."""
    texts = tuple(dict.fromkeys(networks))
    if not 1 <= len(texts) <= LIST_MAX:
        raise ProvisioningInvalid(f"A list of networks has 1 to {LIST_MAX} entries.")
    try:
        return tuple(map(ip_network, texts))
    except ValueError as error:
        raise ProvisioningInvalid(f"Not a network: {error}; write 192.0.2.0/24 or 2001:db8::/32.") from error


def check_limits(concurrency: int | None, credit_limit_nano: int | None) -> None:
    """Raises ProvisioningInvalid."""
    if concurrency is not None and not 1 <= concurrency < 2**31:
        raise ProvisioningInvalid("A concurrency limit is at least 1; suspend the account to let nothing through.")
    if credit_limit_nano is not None and not 0 <= credit_limit_nano < 2**63:
        raise ProvisioningInvalid("A credit limit is not negative, and at most about 9.2 billion USD.")
