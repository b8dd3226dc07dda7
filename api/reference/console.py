"""What the routes of an account's console and of operators answer. Pure shapes."""

from typing import Final

from api.console.audit import AuditQuery, VerifyQuery
from api.console.limits import LimitsQuery, RuleQuery
from api.console.schemas import (
    BudgetsQuery,
    CostsQuery,
    InvoiceQuery,
    LatencyQuery,
    RequestsQuery,
    StatementQuery,
    UsageQuery,
)
from api.errors import RouteUnknown, SignatureInvalid
from api.reference.document import Good, Told, answer, empty
from api.reference.errors import BODY, CONSOLE, KEY, QUERY, STORES, Errors
from api.reference.shapes import (
    COUNT,
    FLAG,
    INSTANT,
    INTEGER,
    NANO_USD,
    NEURONS_TEXT,
    TEXT,
    USD,
    Shape,
    listed,
    one_of,
    or_null,
    record,
    ref,
)
from billing.errors import (
    BudgetNotFound,
    InvoiceNotFound,
    LedgerConflict,
    UsageNotFound,
    UsageQueryUnsupported,
    WebhookInvalid,
    WebhookNotFound,
)
from gateway.errors import ReplicaNotFound, RolloutNotFound, RolloutRefused
from tenancy.errors import (
    KeyNotFound,
    MemberNotFound,
    MembershipConflict,
    NameTaken,
    ProjectNotFound,
    QuotaNotFound,
    RightMissing,
    ServiceAccountNotFound,
    UserNotFound,
)

_COSTS: Final = {"cost": USD, "cost_nano": NANO_USD, "neurons": NEURONS_TEXT}
_TOKENS: Final = {
    "prompt_tokens": COUNT, "cached_tokens": COUNT, "completion_tokens": COUNT, "reasoning_tokens": COUNT,
}  # fmt: skip
_PERIOD: Final = {"account_id": TEXT, "from": INSTANT, "to": INSTANT}
_GROUP: Final = {
    **dict.fromkeys(("model", "key", "project", "day", "hour", "minute"), TEXT),
    "tag": or_null(TEXT),
    "end_user": or_null(TEXT),
}
_OVERLAPPING: Final = {"overlapping": {"const": True}}  # of tags: a request counts for each of its own

CONSOLE_SCHEMAS: Final[dict[str, Shape]] = {
    "RequestRecord": record(
        id=TEXT,
        model=TEXT,
        endpoint=TEXT,
        stream=FLAG,
        outcome=TEXT,
        code=or_null(TEXT),
        finish_reason=or_null(TEXT),
        **_TOKENS,
        usage_source=TEXT,
        **_COSTS,
        price_version=COUNT,
        key_id=TEXT,
        started_at=INSTANT,
        ended_at=INSTANT,
        queued_ms=COUNT,
        ttft_ms=or_null(COUNT),
        tier=one_of("standard", "batch", "priority"),
        end_user=or_null(TEXT),
        tags={"type": "object", "additionalProperties": TEXT},
        kv_page_ms=COUNT,
        deployment=or_null(TEXT),
        precisions=or_null(TEXT),
        region=or_null(TEXT),
        duration_ms=INTEGER,
    ),
    "Key": record(
        id=TEXT,
        name=TEXT,
        kind=one_of("inference", "admin"),
        hint=TEXT,
        scopes=listed(TEXT),
        state=one_of("enabled", "disabled", "revoked"),
        created_at=INSTANT,
        expires_at=or_null(INSTANT),
        revoked_at=or_null(INSTANT),
        last_used_at=or_null(INSTANT),
        lineage_id=TEXT,
        project_id=TEXT,
        service_account_id=or_null(TEXT),
        models=or_null(listed(TEXT)),
        networks=or_null(listed(TEXT)),
    ),
    "Invoice": record(
        number=COUNT,
        name=TEXT,
        month=TEXT,
        issued_at=INSTANT,
        currency={"const": "USD"},
        total=USD,
        paid_from_credit=USD,
        rounding=USD,
        due=USD,
        due_cents=INTEGER,
    ),
    "Account": record(
        id=TEXT,
        name=TEXT,
        created_at=INSTANT,
        plan=one_of("free", "paid"),
        suspended=FLAG,
        concurrency=or_null(COUNT),
        credit_limit=or_null(USD),
        credit_limit_nano=or_null(NANO_USD),
        regions=or_null(listed(TEXT)),
        models=or_null(listed(TEXT)),
        tier=COUNT,
        weight_percent=COUNT,
    ),
    "Budget": record(
        id=TEXT,
        key_id=or_null(TEXT),
        model=or_null(TEXT),
        project_id=or_null(TEXT),
        end_user=or_null(TEXT),
        period=TEXT,
        hard=FLAG,
        set_by=one_of("operator", "account"),
        limit=USD,
        limit_nano=NANO_USD,
        spent=USD,
        spent_nano=NANO_USD,
        created_at=INSTANT,
        **{"from": or_null(INSTANT), "to": or_null(INSTANT)},
    ),
    "Rule": record(
        meter=TEXT,
        limit=INTEGER,
        project_id=or_null(TEXT),
        key_id=or_null(TEXT),
        model=or_null(TEXT),
        set_by=one_of("operator", "account"),
    ),
    "Project": record(
        id=TEXT,
        name=TEXT,
        default=FLAG,
        created_at=INSTANT,
        archived_at=or_null(INSTANT),
        models=or_null(listed(TEXT)),
    ),
    "ServiceAccount": record(
        id=TEXT,
        name=TEXT,
        role=one_of("admin", "developer", "billing", "viewer"),
        state=one_of("enabled", "disabled"),
        created_at=INSTANT,
    ),
    "Webhook": record(id=TEXT, url=TEXT, created_at=INSTANT, waiting=COUNT),
    "Member": record(
        user_id=TEXT,
        email=TEXT,
        name=TEXT,
        role=one_of("owner", "admin", "developer", "billing", "viewer"),
        disabled=FLAG,
        created_at=INSTANT,
    ),
    "AuditEntry": record(
        number=COUNT,
        at=INSTANT,
        account_id=or_null(TEXT),
        actor=record(kind=TEXT, id=or_null(TEXT)),
        action=TEXT,
        subject=or_null(TEXT),
        detail={},
        hash=TEXT,
    ),
}


def _told(schema: Shape, *errors: type[Exception], query: type | None = None, more: Errors = ()) -> Told:
    asked: Errors = QUERY if query is not None else ()
    return Told("Console", (answer(schema),), (*CONSOLE, *asked, *more, *errors), query=query)


USAGE: Final = _told(
    record(
        _OVERLAPPING,
        **_PERIOD,
        group_by=TEXT,
        totals=record(requests=COUNT, kv_page_ms=COUNT, **_TOKENS, **_COSTS),
        groups=listed(record(_GROUP, requests=COUNT, kv_page_ms=COUNT, **_TOKENS, **_COSTS)),
        truncated=FLAG,
    ),
    UsageQueryUnsupported,
    query=UsageQuery,
)
COSTS: Final = _told(
    record(
        _OVERLAPPING,
        **_PERIOD,
        currency={"const": "USD"},
        group_by=TEXT,
        totals=record(**_COSTS),
        groups=listed(record(_GROUP, **_COSTS)),
        truncated=FLAG,
    ),
    UsageQueryUnsupported,
    query=CostsQuery,
)
LATENCY: Final = _told(
    record(
        **_PERIOD,
        answers=COUNT,
        ttft_ms_p50=or_null(COUNT),
        ttft_ms_p95=or_null(COUNT),
        ttft_ms_buckets=listed(record(up_to=or_null(COUNT), answers=COUNT)),
    ),
    query=LatencyQuery,
)
REQUESTS: Final = _told(record(requests=listed(ref("RequestRecord")), next=or_null(TEXT)), query=RequestsQuery)
REQUEST: Final = _told(ref("RequestRecord"), UsageNotFound)
WALLET: Final = _told(
    record(
        account_id=TEXT,
        mode=one_of("postpaid", "prepaid"),
        hold_mode=one_of("refuse", "clamp"),
        wallet=USD,
        wallet_nano=NANO_USD,
        owed=USD,
        owed_nano=NANO_USD,
        grants=listed(
            record(
                id=TEXT,
                amount=USD,
                amount_nano=NANO_USD,
                left=USD,
                left_nano=NANO_USD,
                priority=INTEGER,
                expires_at=or_null(INSTANT),
                created_at=INSTANT,
            )
        ),
    )
)
LEDGER: Final = _told(
    record(
        transactions=listed(
            record(
                source=TEXT,
                kind=TEXT,
                occurred_at=INSTANT,
                posted_at=INSTANT,
                reverses=or_null(TEXT),
                memo=or_null(TEXT),
                entries=listed(record(ledger_account=TEXT, amount=USD, amount_nano=NANO_USD)),
            )
        ),
        next=or_null(TEXT),
    ),
    query=StatementQuery,
)
BUDGETS: Final = _told(record(budgets=listed(ref("Budget"))), query=BudgetsQuery)
BUDGET_ADDED: Final = Told(
    "Console",
    (answer(ref("Budget"), status=201, description="Set."),),
    (*CONSOLE, *BODY, KeyNotFound, ProjectNotFound, LedgerConflict),
)
BUDGET_REMOVED: Final = Told("Console", (empty(),), (*CONSOLE, BudgetNotFound))
INVOICES: Final = _told(record(invoices=listed(ref("Invoice"))))
INVOICE: Final = Told(
    "Console",
    (
        Good(
            {
                "application/json": {"allOf": [ref("Invoice"), record(lines=listed({"type": "object"}))]},
                "text/html": TEXT,
                "text/csv": TEXT,
                "application/pdf": {"type": "string", "contentMediaType": "application/pdf"},
            },
            description="The invoice, in the form that `format` asks for.",
        ),
    ),
    (*CONSOLE, *QUERY, InvoiceNotFound),
    query=InvoiceQuery,
)
WEBHOOKS: Final = _told(record(webhooks=listed(ref("Webhook"))))
WEBHOOK_ADDED: Final = Told(
    "Console",
    (answer({"allOf": [ref("Webhook"), record(secret=TEXT)]}, status=201, description="Added."),),
    (*CONSOLE, *BODY, WebhookInvalid),
)
WEBHOOK_REMOVED: Final = Told("Console", (empty(),), (*CONSOLE, WebhookNotFound))
KEYS: Final = _told(record(keys=listed(ref("Key"))))
KEY_SHOWN: Final = _told(ref("Key"), KeyNotFound)
KEY_ISSUED: Final = Told(
    "Console",
    (answer({"allOf": [ref("Key"), record(key=TEXT)]}, status=201, description="Issued; its text is here alone."),),
    (*CONSOLE, *BODY, NameTaken, KeyNotFound, ProjectNotFound, ServiceAccountNotFound),
)
KEY_CHANGED: Final = _told(ref("Key"), KeyNotFound, more=BODY)
PROJECTS: Final = _told(record(projects=listed(ref("Project"))))
PROJECT: Final = _told(ref("Project"), ProjectNotFound)
PROJECT_OPENED: Final = Told(
    "Console", (answer(ref("Project"), status=201, description="Opened."),), (*CONSOLE, *BODY, NameTaken)
)
PROJECT_CHANGED: Final = _told(ref("Project"), ProjectNotFound, NameTaken, more=BODY)
SERVICE_ACCOUNTS: Final = _told(record(service_accounts=listed(ref("ServiceAccount"))))
SERVICE_ACCOUNT: Final = _told(ref("ServiceAccount"), ServiceAccountNotFound)
SERVICE_ACCOUNT_ADDED: Final = Told(
    "Console", (answer(ref("ServiceAccount"), status=201, description="Added."),), (*CONSOLE, *BODY, NameTaken)
)
SERVICE_ACCOUNT_CHANGED: Final = _told(ref("ServiceAccount"), ServiceAccountNotFound, more=BODY)
LIMITS: Final = _told(
    record(
        {
            "rules": listed(ref("Rule")),
        },
        account_id=TEXT,
        regions=or_null(listed(TEXT)),
        limits=listed(record(meter=TEXT, limit=COUNT, remaining=COUNT, reset_seconds=COUNT)),
    ),
    query=LimitsQuery,
)
RULE_SET: Final = _told(ref("Rule"), KeyNotFound, ProjectNotFound, more=BODY)
RULE_REMOVED: Final = Told(
    "Console", (empty(),), (*CONSOLE, *QUERY, QuotaNotFound, KeyNotFound, ProjectNotFound), query=RuleQuery
)
MEMBERS: Final = _told(record(members=listed(ref("Member"))))
INVITED: Final = Told(
    "Console",
    (answer(record(email=TEXT, role=TEXT, path=TEXT, expires_at=INSTANT), status=201, description="The link, once."),),
    (*CONSOLE, *BODY, RightMissing, NameTaken, MembershipConflict),
)
INVITATIONS_WITHDRAWN: Final = Told("Console", (empty(),), CONSOLE)
MEMBER_CHANGED: Final = _told(ref("Member"), MemberNotFound, UserNotFound, MembershipConflict, RightMissing, more=BODY)
MEMBER_REMOVED: Final = Told(
    "Console", (empty(),), (*CONSOLE, MemberNotFound, UserNotFound, MembershipConflict, RightMissing)
)
AUDIT: Final = _told(record(entries=listed(ref("AuditEntry")), next=or_null(COUNT)), query=AuditQuery)


def _operated(schema: Shape, *errors: type[Exception], query: type | None = None) -> Told:
    asked: Errors = QUERY if query is not None else ()
    return Told("Operation", (answer(schema),), (*KEY, *STORES, *asked, *errors), query=query)


LEAKS: Final = Told(
    "Operation",
    (answer(listed(record(token_hash=TEXT, token_type=TEXT, label=one_of("true_positive", "false_positive")))),),
    (*BODY, SignatureInvalid, RouteUnknown, *STORES),
    open=True,
)
AUDIT_OF_ALL: Final = _operated(record(entries=listed(ref("AuditEntry")), next=or_null(COUNT)), query=AuditQuery)
AUDIT_VERIFIED: Final = _operated(
    record(ok=FLAG, entries=COUNT, head=or_null(record(number=COUNT, hash=TEXT)), broken=listed(TEXT)),
    query=VerifyQuery,
)
USERS: Final = _operated(
    record(
        users=listed(
            record(id=TEXT, email=TEXT, name=TEXT, operator=FLAG, disabled=FLAG, has_password=FLAG, created_at=INSTANT)
        )
    )
)
ACCOUNTS: Final = _operated(record(accounts=listed(ref("Account"))))
ACCOUNT_OPENED: Final = Told(
    "Operation",
    (answer(ref("Account"), status=201, description="Opened."),),
    (*KEY, *STORES, *BODY, NameTaken),
)
ACCOUNT: Final = _told(ref("Account"))
ACCOUNT_CHANGED: Final = _told(ref("Account"), more=BODY)
SWITCHES: Final = _operated(record(disabled=listed(TEXT)))
SWITCHED: Final = Told("Operation", (answer(record(model=TEXT, disabled=FLAG)),), (*KEY, *STORES, *BODY))
INVARIANTS: Final = _operated(
    record(ok=FLAG, live_holds=COUNT, live_slots=COUNT, held_nano=COUNT, kv_pages_held=COUNT, violations=listed(TEXT))
)
_UNIT: Final = record(
    model=TEXT,
    unit=TEXT,
    state=one_of("asleep", "warming", "ready", "draining", "failed"),
    depth=or_null(one_of("stopped", "released")),
    since=INSTANT,
    wish=one_of("awake", "asleep", "held"),
    wished_by=TEXT,
    failures=COUNT,
    why=or_null(TEXT),
    again_in_s=or_null(COUNT),
    place=or_null(TEXT),
    owner=or_null(TEXT),
    kept=FLAG,
    told=TEXT,
)
_UNITS: Final = record(units=listed(_UNIT))
CAPACITY: Final = _operated(
    record(
        models=listed(
            record(
                model=TEXT,
                up=FLAG,
                waiting_for_pages=COUNT,
                waiting=listed({"type": "object"}),
                admitted=COUNT,
                replicas=listed(record(id=TEXT, region=TEXT, standing=TEXT, held_pages=COUNT, live_requests=COUNT)),
            )
        )
    )
)
_SEEN: Final = record(requests=COUNT, errors=COUNT)
_ROLLOUT: Final = record(
    model=TEXT,
    state=one_of("running", "promoted", "rolled_back"),
    new_revision=TEXT,
    old_revision=TEXT,
    share_percent={"type": "number"},
    new=_SEEN,
    old=_SEEN,
    verdict=or_null(one_of("hold", "promote", "rollback")),
    why=TEXT,
    cause=or_null(one_of("operator", "comparison", "never_started")),
    findings=listed(
        record(
            measure=TEXT,
            old=or_null({"type": "number"}),
            new=or_null({"type": "number"}),
            worse=FLAG,
            as_good=FLAG,
            rare=FLAG,
        )
    ),
    evaluation=or_null({"type": "number"}),
    started_at=INSTANT,
    changed_at=INSTANT,
)
ROLLOUTS: Final = _operated(record(rollouts=listed(_ROLLOUT)))
ROLLOUT: Final = Told("Operation", (answer(_ROLLOUT),), (*KEY, *STORES, *BODY, RolloutNotFound, RolloutRefused))
UNITS: Final = _operated(_UNITS)
ORDERED: Final = Told("Operation", (answer(_UNITS),), (*KEY, *STORES, *BODY, ReplicaNotFound))
DRAINED: Final = Told("Operation", (answer(record(id=TEXT, draining=FLAG)),), (*KEY, *STORES, *BODY, ReplicaNotFound))
