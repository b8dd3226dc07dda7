"""No query forgets whose rows it is about: each that reads or changes an account's table speaks of the account.

A small lint over the sources. What is about the whole service on purpose is listed with its reason, and the list may
name nothing that is not so any more.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import billing.tables
import gateway.batches.tables
import tenancy.tables

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("api", "billing", "gateway", "tenancy")
_STARTS = {"select", "update", "delete", "join", "join_from", "outerjoin", "select_from"}
_TABLES = {
    table.name
    for metadata in (tenancy.tables.metadata, billing.tables.metadata, gateway.batches.tables.metadata)
    for table in metadata.sorted_tables
    if "account_id" in table.c or table.name in {"accounts", "ledger_entries", "file_parts"}
}

# Of the whole service on purpose: why, and which.
_WHY: dict[str, dict[str, tuple[str, ...]]] = {
    "a worker's loop over all accounts": {
        "billing/alerts": ("_with_budgets",),
        "billing/credit/allowances": (
            "forget",
            "renew",
        ),
        "billing/funds": ("read_revisions",),
        "billing/kept_answers": (
            "KeptAnswers.end_abandoned",
            "KeptAnswers.sweep",
        ),
        "billing/webhooks/outbox": (
            "_first_of_each",
            "any_due",
            "claim_due",
            "forget_one",
            "sweep",
        ),
        "gateway/batches/files": ("FileStore.sweep",),
        "gateway/batches/store": (
            "BatchStore.open_batches",
            "BatchStore.sweep",
        ),
        "tenancy/people_store": ("PeopleStore.sweep_links",),
    },
    "an operator's view of every account": {
        "billing/ledger/periods": ("closed_months",),
        "tenancy/audit_log": ("_all",),
        "tenancy/pepper": ("_has_keys",),
        "tenancy/store": (
            "TenancyStore.accounts",
            "TenancyStore.add_account",
            "TenancyStore.has_accounts",
        ),
    },
    "begins from a secret that nobody else has": {
        "tenancy/people_store": (
            "PeopleStore.link",
            "PeopleStore.use_link",
        ),
        "tenancy/store": ("TenancyStore.bearer",),
    },
    "checks everything against everything": {
        "billing/audit": (
            "_other_sums",
            "_overbooked",
            "_unbalanced",
        ),
    },
    "of one thing, whose id the caller found in its account or keeps in a worker": {
        "billing/alerts": ("_tell",),
        "billing/credit/allowances": (
            "_amount",
            "_raise",
            "give_back",
        ),
        "billing/ledger/payers": ("_open_grants",),
        "billing/ledger/transactions": (
            "post",
            "posted_nano",
        ),
        "billing/webhooks/outbox": (
            "_end",
            "_waiting",
            "mark_failed",
        ),
        "gateway/batches/files": (
            "FileStore.part",
            "_delete",
        ),
        "gateway/batches/line_rows": (
            "end_waiting",
            "has_any",
            "leave_to_anybody",
            "next_answers",
            "recount",
        ),
        "gateway/batches/store": (
            "BatchStore._lease",
            "BatchStore._move",
            "BatchStore._stop_if_full",
            "BatchStore.advance",
            "BatchStore.claim",
            "BatchStore.end",
            "BatchStore.find",
            "BatchStore.keep",
            "BatchStore.put_back",
        ),
    },
}
SERVICE_WIDE = {f"{file}.py:{name}" for files in _WHY.values() for file, names in files.items() for name in names}


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every function that is not inside another, by its name within the file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _queried(function: ast.AST) -> set[str]:
    """Tables of accounts that a query in the function begins from."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STARTS:
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found & _TABLES


def _speaks_of_the_account(function: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Compare) and "account_id" in ast.unparse(node))
        or (isinstance(node, ast.Name) and node.id == "account_id")
        or (isinstance(node, ast.keyword) and node.arg == "account_id")
        for node in ast.walk(function)
    )


def _forgetful(source: str) -> list[str]:
    return [
        name
        for name, function in _functions(ast.parse(source))
        if _queried(function) and not _speaks_of_the_account(function)
    ]


def test_every_query_of_an_accounts_table_names_the_account_or_is_the_services_on_purpose() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}"
        for package in _PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in _forgetful(path.read_text())
    }
    assert found - SERVICE_WIDE == set(), "name the account, or say in _WHY why it is about all of them"
    assert SERVICE_WIDE - found == set(), "these are about one account now: take them off the list"


def test_the_lint_sees_what_is_forgotten() -> None:
    assert _forgetful("def f(c):\n    c.execute(sa.select(api_keys).where(api_keys.c.id == 1))") == ["f"]
    assert _forgetful("class A:\n    def f(self):\n        return budgets.update().values(x=1)") == ["A.f"]
    assert not _forgetful("def f(account_id):\n    sa.select(budgets).where(budgets.c.account_id == account_id)")
    assert not _forgetful("def f():\n    return sa.select(prices)")
