"""create_app(services): every route, the one middleware, and the handlers that turn errors into answers.

Called by serving.py and by tests, which hand in fakes. Opening and closing of services is wiring.py's.
"""

from functools import partial

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, request_response
from starlette.types import ASGIApp, Scope

from api.console.accounts import AccountRoutes
from api.console.audit import AuditRoutes
from api.console.batches import OperatorBatchRoutes
from api.console.budgets import BudgetBody, BudgetRoutes
from api.console.invoices import InvoiceRoutes
from api.console.keys import KeyBody, KeyChangeBody, KeyRoutes, RotationBody
from api.console.ledger import LedgerRoutes
from api.console.limits import LimitRoutes, RuleBody
from api.console.members import InvitationBody, MemberRoutes, RoleBody
from api.console.operations import DrainBody, OperationRoutes
from api.console.projects import ProjectBody, ProjectChangeBody, ProjectRoutes
from api.console.rollouts import RolloutBody, RolloutRoutes
from api.console.secret_scanning import FindingsBody, SecretScanningRoute
from api.console.service_accounts import ServiceAccountBody, ServiceAccountChangeBody, ServiceAccountRoutes
from api.console.tenants import AccountBody, AccountChangeBody, SwitchBody, TenantRoutes
from api.console.units import OrderBody, UnitRoutes
from api.console.webhooks import WebhookBody, WebhookRoutes
from api.dashboard.app import dashboard_routes
from api.departure import ClientGone
from api.errors import BodyNotJson, MethodNotAllowed, RouteUnknown
from api.health import HealthRoutes
from api.hot_routes import Endpoint, HotRoute, HotRoutes, serve_hot
from api.middleware import BodyBounds, RequestCounts, RequestRim
from api.openai.batches import BatchBody, BatchRoutes
from api.openai.chat import ChatRoute
from api.openai.completions import CompletionRoute
from api.openai.embeddings import EmbeddingsBody, EmbeddingsRoute
from api.openai.files import FileRoutes, FileUpload
from api.openai.models import ModelRoutes
from api.openai.responses import ResponsesRoute
from api.openai.responses_kept import KeptResponseRoutes
from api.openai.responses_schemas import ResponsesBody
from api.openai.schemas import ChatBody, CompletionBody
from api.reference import batches as batched
from api.reference import catalogue, console, generated
from api.reference.document import Described, Told, document
from api.reference.page import ReferencePage
from api.refusals import FORESEEN, refusal
from api.services import Services
from api.workers_ai.batch import BatchQueue
from api.workers_ai.model_schema import SchemaRoute
from api.workers_ai.models import SearchRoute
from api.workers_ai.run import RunRoute
from api.workers_ai.schemas import NamedRunBody, RunBody
from api.workers_ai.tokens import TokenRoutes
from api.workers_ai.usage import UsageRoute

# Where tokens are generated: see hot_routes.py.
_HOT_ENDINGS = ("/completions", "/responses", "/ai/run/{model:path}", "/ai/run")
# Of a form with a file, what is not the file.
_FORM_BYTES = 64 << 10
_ACCOUNT = "/client/v4/accounts/{account_id}"
_CONSOLE_ACCOUNT = "/console/v1/accounts/{account_id}"
_SCHEMAS = {
    **generated.GENERATED_SCHEMAS,
    **catalogue.CATALOGUE_SCHEMAS,
    **console.CONSOLE_SCHEMAS,
    **batched.BATCH_SCHEMAS,
}


class PlainRoute(Route):
    """A route of one method whose endpoint takes the request and gives the response.

    No dependency tree is made or walked, and endpoints read bodies from bytes. The document lists it (`Described`).
    """

    def __init__(self, method: str, path: str, endpoint: Endpoint) -> None:
        super().__init__(path, endpoint, methods=[method])
        # What starlette would take for an application, or answer HEAD with, is neither.
        self.app = request_response(endpoint)
        self.methods = {method}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """The access log, the counts and refusals ask the scope for the route."""
        match, found = super().matches(scope)
        return match, {**found, "route": self} if found else found


def create_app(services: Services) -> ASGIApp:
    """The whole application: generating routes by the short way, everything else through the framework."""
    app = framework_app(services)
    rim = partial(
        RequestRim,
        body=BodyBounds(services.settings.body_bytes_max, services.settings.body_seconds_max),
        upload=BodyBounds(services.settings.batches.file_bytes_max + _FORM_BYTES, services.settings.upload_seconds_max),
        counts=RequestCounts(services.registry),
    )
    app.add_middleware(rim)
    hot = [
        HotRoute(route.path, route.path_regex, route.endpoint)
        for route in app.routes
        if isinstance(route, PlainRoute) and route.path.endswith(_HOT_ENDINGS)
    ]
    return HotRoutes(app, rim(serve_hot), hot)


def framework_app(services: Services) -> FastAPI:
    """Every route and the OpenAPI document of them."""
    app = FastAPI(
        title="Pagegate",
        description="Serverless inference: Workers AI's REST API and OpenAI's.",
        docs_url=None,  # the page would load scripts from elsewhere; ours is reference/page.py
        redoc_url=None,
        redirect_slashes=False,
    )
    described: list[Described] = []
    app.state.described = described
    # FastAPI's own document would know neither answers nor refusals: its routes declare none.
    app.openapi = partial(  # type: ignore[method-assign]  # as FastAPI says to replace it
        document, described, _SCHEMAS, choices_max=services.settings.choices_max
    )
    _add_generation(app, services)
    _add_embeddings(app, services)
    _add_batches(app, services)
    _add_models_and_tokens(app, services)
    _add_console(app, services)
    _add_health(app, services)
    _add(app, "GET", "/docs", ReferencePage(app.openapi).page, told=catalogue.PAGE)
    app.router.routes.extend(dashboard_routes(services))
    for kind in FORESEEN:
        app.add_exception_handler(kind, _refuse)
    app.add_exception_handler(HTTPException, partial(_refuse_unrouted, _methods(described)))
    app.add_exception_handler(ClientGone, _nobody_listens)
    return app


def _add_generation(app: FastAPI, services: Services) -> None:
    chat, completions, run = ChatRoute(services), CompletionRoute(services), RunRoute(services)
    _add(app, "POST", f"{_ACCOUNT}/ai/v1/chat/completions", chat.create, body=ChatBody, told=generated.CHAT)
    _add(app, "POST", "/v1/chat/completions", chat.create, body=ChatBody, told=generated.CHAT)
    _add(app, "POST", f"{_ACCOUNT}/ai/run/{{model:path}}", run.run, body=RunBody, told=generated.RUN)
    _add(app, "POST", f"{_ACCOUNT}/ai/run", run.run_named, body=NamedRunBody, told=generated.RUN)
    _add(
        app,
        "POST",
        f"{_ACCOUNT}/ai/v1/completions",
        completions.create,
        body=CompletionBody,
        told=generated.COMPLETIONS,
    )
    _add(app, "POST", "/v1/completions", completions.create, body=CompletionBody, told=generated.COMPLETIONS)
    responses = ResponsesRoute(services)
    _add(app, "POST", f"{_ACCOUNT}/ai/v1/responses", responses.create, body=ResponsesBody, told=generated.RESPONSES)
    _add(app, "POST", "/v1/responses", responses.create, body=ResponsesBody, told=generated.RESPONSES)
    kept = KeptResponseRoutes(services)
    for prefix in (f"{_ACCOUNT}/ai/v1", "/v1"):
        _add(app, "GET", f"{prefix}/responses/{{response_id}}", kept.retrieve, told=generated.KEPT_RESPONSE)
        items = f"{prefix}/responses/{{response_id}}/input_items"
        _add(app, "GET", items, kept.input_items, told=generated.RESPONSE_INPUT)
        _add(app, "DELETE", f"{prefix}/responses/{{response_id}}", kept.delete, told=generated.KEPT_RESPONSE_DELETED)


def _add_embeddings(app: FastAPI, services: Services) -> None:
    embeddings = EmbeddingsRoute(services)
    for prefix in (f"{_ACCOUNT}/ai/v1", "/v1"):
        _add(app, "POST", f"{prefix}/embeddings", embeddings.create, body=EmbeddingsBody, told=generated.EMBEDDINGS)


def _add_batches(app: FastAPI, services: Services) -> None:
    queue = BatchQueue(services)
    _add(app, "GET", f"{_ACCOUNT}/ai/batches", queue.all_batches, told=batched.QUEUED)
    _add(app, "GET", f"{_ACCOUNT}/ai/batches/{{request_id}}", queue.one_batch, told=batched.QUEUED_ONE)
    _add(app, "DELETE", f"{_ACCOUNT}/ai/batches/{{request_id}}", queue.cancel, told=batched.QUEUED_CANCELLED)
    files, batches = FileRoutes(services), BatchRoutes(services)
    for prefix in (f"{_ACCOUNT}/ai/v1", "/v1"):
        _add(
            app,
            "POST",
            f"{prefix}/files",
            files.upload,
            body=FileUpload,
            media_type="multipart/form-data",
            told=batched.UPLOAD,
        )
        _add(app, "GET", f"{prefix}/files", files.all_files, told=batched.FILES)
        _add(app, "GET", f"{prefix}/files/{{file_id}}", files.retrieve, told=batched.FILE)
        _add(app, "GET", f"{prefix}/files/{{file_id}}/content", files.content, told=batched.CONTENT)
        _add(app, "DELETE", f"{prefix}/files/{{file_id}}", files.delete, told=batched.FILE_DELETED)
        _add(app, "POST", f"{prefix}/batches", batches.create, body=BatchBody, told=batched.BATCH_MADE)
        _add(app, "GET", f"{prefix}/batches", batches.all_batches, told=batched.BATCHES)
        _add(app, "GET", f"{prefix}/batches/{{batch_id}}", batches.retrieve, told=batched.BATCH)
        _add(app, "POST", f"{prefix}/batches/{{batch_id}}/cancel", batches.cancel, told=batched.BATCH_CANCELLED)


def _add_models_and_tokens(app: FastAPI, services: Services) -> None:
    models, search, tokens = ModelRoutes(services), SearchRoute(services), TokenRoutes(services)
    for prefix in (f"{_ACCOUNT}/ai/v1", "/v1"):
        _add(app, "GET", f"{prefix}/models", models.all_models, told=catalogue.MODELS)
        _add(app, "GET", f"{prefix}/models/{{model:path}}", models.retrieve, told=catalogue.MODEL)
    _add(app, "GET", f"{_ACCOUNT}/ai/models/search", search.search, told=catalogue.SEARCH)
    _add(app, "GET", f"{_ACCOUNT}/ai/models/schema", SchemaRoute(services).schema, told=catalogue.SCHEMA)
    _add(app, "GET", f"{_ACCOUNT}/ai/tasks/search", search.tasks, told=catalogue.TASKS)
    _add(app, "GET", f"{_ACCOUNT}/ai/authors/search", search.authors, told=catalogue.AUTHORS)
    _add(app, "GET", f"{_ACCOUNT}/ai/usage", UsageRoute(services).usage, told=catalogue.USAGE)
    _add(app, "GET", "/client/v4/user/tokens/verify", tokens.verify_user, told=catalogue.TOKEN)
    _add(app, "GET", f"{_ACCOUNT}/tokens/verify", tokens.verify_account, told=catalogue.TOKEN)


def _add_console(app: FastAPI, services: Services) -> None:
    accounts, operations, money = AccountRoutes(services), OperationRoutes(services), LedgerRoutes(services)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/usage", accounts.usage, told=console.USAGE)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/costs", accounts.costs, told=console.COSTS)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/latency", accounts.latency, told=console.LATENCY)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/requests", accounts.requests, told=console.REQUESTS)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/requests/{{request_id}}", accounts.request_record, told=console.REQUEST)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/wallet", money.wallet, told=console.WALLET)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/ledger", money.ledger, told=console.LEDGER)
    budgets = BudgetRoutes(services)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/budgets", budgets.all_budgets, told=console.BUDGETS)
    _add(app, "POST", f"{_CONSOLE_ACCOUNT}/budgets", budgets.add, body=BudgetBody, told=console.BUDGET_ADDED)
    _add(app, "DELETE", f"{_CONSOLE_ACCOUNT}/budgets/{{budget_id}}", budgets.remove, told=console.BUDGET_REMOVED)
    invoices = InvoiceRoutes(services)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/invoices", invoices.all_invoices, told=console.INVOICES)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/invoices/{{number}}", invoices.one_invoice, told=console.INVOICE)
    webhooks = WebhookRoutes(services)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/webhooks", webhooks.all_webhooks, told=console.WEBHOOKS)
    _add(app, "POST", f"{_CONSOLE_ACCOUNT}/webhooks", webhooks.add, body=WebhookBody, told=console.WEBHOOK_ADDED)
    _add(app, "DELETE", f"{_CONSOLE_ACCOUNT}/webhooks/{{webhook_id}}", webhooks.remove, told=console.WEBHOOK_REMOVED)
    _add_keys_and_limits(app, services)
    _add_tenants(app, services)
    _add_people(app, services)
    batches = OperatorBatchRoutes(services)
    _add(app, "GET", "/console/v1/batches", batches.of_all, told=batched.OF_ALL)
    _add(app, "POST", "/console/v1/batches/{batch_id}/cancel", batches.cancel, told=batched.CANCELLED_BY_OPERATOR)
    rollouts = RolloutRoutes(services)
    _add(app, "GET", "/console/v1/rollouts", rollouts.all_rollouts, told=console.ROLLOUTS)
    _add(app, "POST", "/console/v1/rollouts", rollouts.change, body=RolloutBody, told=console.ROLLOUT)
    _add(app, "GET", "/console/v1/invariants", operations.invariants, told=console.INVARIANTS)
    _add(app, "GET", "/console/v1/capacity", operations.capacity, told=console.CAPACITY)
    engines = UnitRoutes(services)
    _add(app, "GET", "/console/v1/units", engines.all_units, told=console.UNITS)
    _add(app, "POST", "/console/v1/units/orders", engines.order, body=OrderBody, told=console.ORDERED)
    _add(app, "POST", "/console/v1/replicas/{replica_id}/drain", operations.drain, body=DrainBody, told=console.DRAINED)


def _add_keys_and_limits(app: FastAPI, services: Services) -> None:
    keys = KeyRoutes(services)
    one = f"{_CONSOLE_ACCOUNT}/keys/{{key_id}}"
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/keys", keys.all_keys, told=console.KEYS)
    _add(app, "POST", f"{_CONSOLE_ACCOUNT}/keys", keys.issue, body=KeyBody, told=console.KEY_ISSUED)
    _add(app, "GET", one, keys.one_key, told=console.KEY_SHOWN)
    _add(app, "PATCH", one, keys.change, body=KeyChangeBody, told=console.KEY_CHANGED)
    _add(app, "DELETE", one, keys.revoke, told=console.KEY_SHOWN)
    _add(app, "POST", f"{one}/rotate", keys.rotate, body=RotationBody, body_required=False, told=console.KEY_ISSUED)
    limits = LimitRoutes(services)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/limits", limits.limits, told=console.LIMITS)
    _add(app, "PUT", f"{_CONSOLE_ACCOUNT}/limits", limits.set_rule, body=RuleBody, told=console.RULE_SET)
    _add(app, "DELETE", f"{_CONSOLE_ACCOUNT}/limits", limits.remove_rule, told=console.RULE_REMOVED)
    projects = ProjectRoutes(services)
    one = f"{_CONSOLE_ACCOUNT}/projects/{{project_id}}"
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/projects", projects.all_projects, told=console.PROJECTS)
    _add(app, "POST", f"{_CONSOLE_ACCOUNT}/projects", projects.open, body=ProjectBody, told=console.PROJECT_OPENED)
    _add(app, "GET", one, projects.one_project, told=console.PROJECT)
    _add(app, "PATCH", one, projects.change, body=ProjectChangeBody, told=console.PROJECT_CHANGED)
    programs = ServiceAccountRoutes(services)
    one = f"{_CONSOLE_ACCOUNT}/service_accounts/{{service_account_id}}"
    added, changed = console.SERVICE_ACCOUNT_ADDED, console.SERVICE_ACCOUNT_CHANGED
    _add(
        app,
        "GET",
        f"{_CONSOLE_ACCOUNT}/service_accounts",
        programs.all_service_accounts,
        told=console.SERVICE_ACCOUNTS,
    )
    _add(app, "POST", f"{_CONSOLE_ACCOUNT}/service_accounts", programs.add, body=ServiceAccountBody, told=added)
    _add(app, "GET", one, programs.one_service_account, told=console.SERVICE_ACCOUNT)
    _add(app, "PATCH", one, programs.change, body=ServiceAccountChangeBody, told=changed)


def _add_tenants(app: FastAPI, services: Services) -> None:
    tenants = TenantRoutes(services)
    _add(app, "GET", "/console/v1/accounts", tenants.all_accounts, told=console.ACCOUNTS)
    _add(app, "POST", "/console/v1/accounts", tenants.open, body=AccountBody, told=console.ACCOUNT_OPENED)
    _add(app, "GET", _CONSOLE_ACCOUNT, tenants.one_account, told=console.ACCOUNT)
    _add(app, "PATCH", _CONSOLE_ACCOUNT, tenants.change, body=AccountChangeBody, told=console.ACCOUNT_CHANGED)
    _add(app, "GET", "/console/v1/model_switches", tenants.switches, told=console.SWITCHES)
    _add(app, "POST", "/console/v1/model_switches", tenants.switch, body=SwitchBody, told=console.SWITCHED)


def _add_people(app: FastAPI, services: Services) -> None:
    members, audit = MemberRoutes(services), AuditRoutes(services)
    one = f"{_CONSOLE_ACCOUNT}/members/{{user_id}}"
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/members", members.members, told=console.MEMBERS)
    _add(app, "POST", f"{_CONSOLE_ACCOUNT}/invitations", members.invite, body=InvitationBody, told=console.INVITED)
    _add(app, "DELETE", f"{_CONSOLE_ACCOUNT}/invitations", members.withdraw, told=console.INVITATIONS_WITHDRAWN)
    _add(app, "PATCH", one, members.change, body=RoleBody, told=console.MEMBER_CHANGED)
    _add(app, "DELETE", one, members.remove, told=console.MEMBER_REMOVED)
    _add(app, "GET", f"{_CONSOLE_ACCOUNT}/audit", audit.of_account, told=console.AUDIT)
    _add(app, "GET", "/console/v1/audit", audit.of_all, told=console.AUDIT_OF_ALL)
    _add(app, "GET", "/console/v1/audit/verify", audit.verify, told=console.AUDIT_VERIFIED)
    _add(app, "GET", "/console/v1/users", audit.users, told=console.USERS)
    scanning = SecretScanningRoute(services)
    _add(app, "POST", "/console/v1/secret_scanning", scanning.report, body=FindingsBody, told=console.LEAKS)


def _add_health(app: FastAPI, services: Services) -> None:
    health = HealthRoutes(services)
    _add(app, "GET", "/health/live", health.live, told=catalogue.LIVE)
    _add(app, "GET", "/health/ready", health.ready, told=catalogue.READY)
    _add(app, "GET", "/metrics", health.metrics, told=catalogue.METRICS)


def _add(
    app: FastAPI,
    method: str,
    path: str,
    endpoint: Endpoint,
    *,
    body: type[BaseModel] | None = None,
    body_required: bool = True,
    media_type: str = "application/json",
    told: Told | None = None,
) -> None:
    """told: what the API's document says of the route beside its path, its docstring and its body."""
    app.state.described.append(Described(method, path, endpoint, body, body_required, media_type, told))
    app.router.routes.append(PlainRoute(method, path, endpoint))


async def _refuse(request: Request, error: Exception) -> Response:
    return refusal(request, error)


def _methods(described: list[Described]) -> dict[str, str]:
    """All methods of each path: the router names those of one route alone."""
    methods: dict[str, list[str]] = {}
    for route in described:
        methods.setdefault(route.path, []).append(route.method)
    return {path: ", ".join(sorted(of_path)) for path, of_path in methods.items()}


async def _refuse_unrouted(methods: dict[str, str], request: Request, error: Exception) -> Response:
    """What the router itself refuses: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        path = getattr(request.scope.get("route"), "path", "")
        allow = methods.get(path) or (error.headers or {}).get("Allow", "")
        return refusal(request, MethodNotAllowed(request.method, allow))
    if error.status_code == 404:
        return refusal(request, RouteUnknown())
    return refusal(request, BodyNotJson(str(error.detail)))


async def _nobody_listens(_request: Request, _error: Exception) -> Response:
    """499 is for the access log alone: the client has left."""
    return Response(status_code=499)
