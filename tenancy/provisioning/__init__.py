"""Opening accounts, setting limits, issuing and rotating keys: each deed is one write transaction.

Called by the command line, the console and the dashboard. Each deed writes who did it into the audit log (`by`), as the
last thing of its transaction.
"""

from tenancy.provisioning.accounts import (
    get_account,
    list_accounts,
    open_account,
    set_limits,
    set_models,
    set_plan,
    set_regions,
    set_suspended,
    set_turns,
)
from tenancy.provisioning.checks import LIST_MAX, MODEL_ID, REGION_NAME, ProvisioningInvalid, check_models, check_name
from tenancy.provisioning.first_start import Bootstrap, bootstrap
from tenancy.provisioning.keys import (
    GRACE_S_MAX,
    IssuedKey,
    get_key,
    issue_key,
    list_keys,
    revoke_key,
    rotate_key,
    set_key_disabled,
)
from tenancy.provisioning.limits import list_quotas, remove_quota, set_quota

__all__ = [
    "GRACE_S_MAX",
    "LIST_MAX",
    "MODEL_ID",
    "REGION_NAME",
    "Bootstrap",
    "IssuedKey",
    "ProvisioningInvalid",
    "bootstrap",
    "check_models",
    "check_name",
    "get_account",
    "get_key",
    "issue_key",
    "list_accounts",
    "list_keys",
    "list_quotas",
    "open_account",
    "remove_quota",
    "revoke_key",
    "rotate_key",
    "set_key_disabled",
    "set_limits",
    "set_models",
    "set_plan",
    "set_quota",
    "set_regions",
    "set_suspended",
    "set_turns",
]
