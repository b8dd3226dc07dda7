"""`pagegate serve`: from nothing to a running service. First start and every other are the same command.

Makes the data folder, fetches the checkpoint of the embedded engine, upgrades the schema, opens the first account, and
then serves until it is told to stop; running answers get their time to end. Each thing that can be in the way is one
sentence and exit code 1, but for PostgreSQL that does not answer: that is waited for, and said to whoever asks.
"""

import asyncio
import errno
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import orjson
import structlog
import typer

from api.awaiting import answer_until
from api.cli.models import pull_showing_progress
from api.logs import configure_logging
from api.place import is_left
from api.serving import allow_many_connections, hold_hangups, loop_factory, serve_on
from api.settings import Settings, keep_tokenizers_single_threaded, load_settings
from api.siblings import Siblings
from api.wiring import open_services
from api.workers.child import WorkerFailed
from api.workers.supervisor import supervise
from backends.checkpoints import DEFAULT_CHECKPOINT, EMBEDDING_CHECKPOINT
from billing.price_book import seed_default_price
from tenancy.database import Database, drivers_words, open_database
from tenancy.errors import TenancyUnavailable
from tenancy.migrations import upgrade_schema
from tenancy.pepper import open_pepper_of
from tenancy.provisioning import bootstrap

log = structlog.get_logger(__name__)

_MIGRATIONS = Path(__file__).resolve().parents[2] / "deploy" / "migrations"
_BACKLOG = 2048
# A worker that had just been started when its supervisor was killed notices once it has been loaded.
_PORT_LEFT_S_MAX = 20.0
_PORT_CHECK_S = 0.02
_DATABASE_RETRY_S = 0.5
# A new database, its write-ahead log and a first spool segment need a few; the rest is for the first requests.
_FREE_BYTES_MIN = 64 << 20


class ServeFailed(Exception):
    """Something is in the way of serving; the message is the one sentence for the operator."""


def serve(
    *,
    deployment: Annotated[
        Path | None,
        typer.Option("--deployment", "-d", help="Models and engines (TOML), instead of PAGEGATE_DEPLOYMENT."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=64, help="Processes on the port, instead of PAGEGATE_WORKERS.")
    ] = None,
) -> None:
    """Serve both APIs. Settings: PAGEGATE_* variables and one TOML file (`pagegate config check` shows them). On SIGHUP
    the deployment file is read again.
    """
    hold_hangups()
    chosen = {"PAGEGATE_DEPLOYMENT": deployment, "PAGEGATE_WORKERS": workers}
    settings = load_settings(chosen={name: str(value) for name, value in chosen.items() if value is not None})
    keep_tokenizers_single_threaded()
    configure_logging(settings)
    allow_many_connections()
    try:
        with _listen(settings) as listener:
            port = listener.getsockname()[1]
            base_url = f"http://{_public_host(settings.host)}:{port}"
            _provide(settings)
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                try:
                    first = _open_accounts(settings, base_url)
                except TenancyUnavailable as error:
                    if settings.database_url.startswith("sqlite"):
                        # A file that can't be used will not come back by itself.
                        raise ServeFailed(f"The database can't be used: {drivers_words(error) or error}.") from error
                    waiting = _accounts_once_it_answers(settings, base_url, error)
                    found = runner.run(answer_until(listener, settings, waiting))
                    if found is None:
                        return
                    (first,) = found
                serving = _serve if settings.workers == 1 else _supervise
                runner.run(serving(settings, listener, first))
    except WorkerFailed as error:
        raise ServeFailed(f"{error}: its own words stand above.") from error
    except ModuleNotFoundError as error:
        raise ServeFailed(
            f"The Python package {error.name} is not installed: PostgreSQL needs pagegate[postgres], "
            "shared meters pagegate[shared], the embedded engine pagegate[local]."
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ServeFailed(f"The disk of {settings.home} is full: free some space and start again.") from error
        raise ServeFailed(f"{error.strerror or error}: {error.filename or settings.home}") from error


def _listen(settings: Settings) -> socket.socket:
    """Taken before anything is made or fetched, so that a taken port is the first thing an operator hears of.

    Where a supervisor that was killed may have left workers, they are given the time to let go of it.
    """
    until: float | None = None
    while True:
        try:
            return _listener(settings)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ServeFailed(f"Can't listen on {settings.host}:{settings.port}: {error.strerror}.") from error
            if until is None:
                until = time.monotonic() + (_PORT_LEFT_S_MAX if is_left(settings.home) else 0.0)
            if time.monotonic() >= until:
                raise ServeFailed(
                    f"Port {settings.port} of {settings.host} is taken: stop what listens there or set PAGEGATE_PORT."
                ) from error
        time.sleep(_PORT_CHECK_S)


def _listener(settings: Settings) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With its protocol, by which asyncio knows that connections must not wait for more to send (uvloop never does).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def prepare(settings: Settings, *, base_url: str) -> dict[str, str] | None:
    """Everything that must exist before serving. Returns bootstrap.json's content, None if it is not there.

    Raises CheckpointError, OSError, or what the database raises.
    """
    _provide(settings)
    return _open_accounts(settings, base_url)


def _provide(settings: Settings) -> None:
    """What must lie on this machine."""
    _require_home(settings.home)
    if settings.deployment is None and settings.backends.checkpoint is None:
        pull_showing_progress(DEFAULT_CHECKPOINT, settings.cache_dir)
    if settings.embeds and settings.backends.embedding_checkpoint is None:
        pull_showing_progress(EMBEDDING_CHECKPOINT, settings.cache_dir)


def _open_accounts(settings: Settings, base_url: str) -> dict[str, str] | None:
    """What must stand in the database: as prepare."""
    database = open_database(settings.database_url)
    try:
        upgrade_schema(database.engine, _MIGRATIONS)
        pepper = open_pepper_of(database, settings.pepper_path)
        if settings.deployment is None:
            _seed_price(database, settings.model_id)
        if settings.embeds:
            _seed_embedding_price(database, settings.embedding_model_id)
        opened = bootstrap(database, pepper, clock=time.time_ns)
    finally:
        database.close()
    if opened is not None:
        facts = {
            "base_url": base_url,
            "account_id": opened.account.id,
            "api_key": opened.inference_key.text,
            "admin_key": opened.admin_key.text,
        }
        _write_bootstrap(settings, facts)
        return facts
    if not settings.bootstrap_path.exists():
        return None
    try:
        return {**orjson.loads(settings.bootstrap_path.read_bytes()), "base_url": base_url}
    except (orjson.JSONDecodeError, TypeError) as error:
        raise ServeFailed(
            f"{settings.bootstrap_path} is damaged: remove it, and issue keys with `pagegate keys issue`."
        ) from error


async def _accounts_once_it_answers(
    settings: Settings, base_url: str, error: TenancyUnavailable
) -> tuple[dict[str, str] | None]:
    """Ask again until the database answers. In threads, since each question may wait for it."""
    log.warning("the database does not answer", why=drivers_words(error) or str(error))  # it may be a wrong setting
    while True:
        await asyncio.sleep(_DATABASE_RETRY_S)
        try:
            found = await asyncio.to_thread(_open_accounts, settings, base_url)
        except TenancyUnavailable:
            continue
        log.info("the database answers")
        return (found,)


def _require_home(home: Path) -> None:
    """Make the data folder if need be, and find out now whether it can be written: a database would say it worse.

    Raises ServeFailed (a file, read-only, no permission, too little space); a folder made here is taken away again.
    """
    made = not home.exists()
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        roomy = shutil.disk_usage(home).free >= _FREE_BYTES_MIN
        if roomy:
            with tempfile.TemporaryFile(dir=home):
                return
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        why = error.strerror or error
        raise ServeFailed(f"The data folder {home} can't be used ({why}): mend it or set PAGEGATE_HOME.") from error
    if made:
        home.rmdir()
    raise ServeFailed(
        f"The disk of {home} is full (under {_FREE_BYTES_MIN >> 20} MiB free): free some space and start again."
    )


def _write_bootstrap(settings: Settings, facts: dict[str, str]) -> None:
    _write_private(settings.bootstrap_path, orjson.dumps(facts, option=orjson.OPT_INDENT_2))


def _seed_price(database: Database, model: str) -> None:
    """The embedded default's price until an operator sets one: an arbitrary small figure, in nano-USD per million."""
    seed_default_price(
        database,
        model,
        input_nano_per_m=10_000_000,
        cached_input_nano_per_m=2_500_000,
        output_nano_per_m=40_000_000,
        now_ns=time.time_ns(),
    )


def _seed_embedding_price(database: Database, model: str) -> None:
    """As above, for input alone: an embedding has no output tokens."""
    seed_default_price(
        database,
        model,
        input_nano_per_m=2_000_000,
        cached_input_nano_per_m=None,
        output_nano_per_m=0,
        now_ns=time.time_ns(),
    )


def _write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and readable by its owner alone (a temporary file is made with mode 0600)."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


async def _serve(settings: Settings, listener: socket.socket, first: dict[str, str] | None) -> None:
    async with open_services(settings) as services:
        if first is not None:
            _write_bootstrap(settings, first)  # only now is the data folder ours: a second process has failed before
        model = services.catalogue.all()[0].id
        announcing = asyncio.create_task(_announce(settings, first, model, _said(services.ready)), name="announce")
        try:
            await serve_on(listener, services)
        finally:
            announcing.cancel()


async def _supervise(settings: Settings, listener: socket.socket, first: dict[str, str] | None) -> None:
    async def announce(workers: Siblings, model: str) -> None:
        async def all_ready() -> bool:
            standing = await workers.ask("ready")
            return len(standing) == settings.workers and all(ready for ready, _ in standing.values())

        await _announce(settings, first, model, all_ready)
        if first is not None:
            _write_bootstrap(settings, first)

    await supervise(settings, listener, announce)


def _said(ready: Callable[[], tuple[bool, str]]) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return ready()[0]

    return answer


async def _announce(
    settings: Settings, first: dict[str, str] | None, model: str, is_ready: Callable[[], Awaitable[bool]]
) -> None:
    """Say how to use it, once it can be used."""
    began = time.monotonic()
    typer.echo("Pagegate: waiting for the engine ...", err=True)
    while not await is_ready():
        if time.monotonic() - began > settings.backends.start_s_max:
            log.error(
                "the engine is not ready", waited_s=settings.backends.start_s_max, log=str(settings.engine_log_path)
            )
            began = time.monotonic()
        await asyncio.sleep(0.1)
    if first is None:
        typer.echo("Pagegate is ready. Issue a key with `pagegate keys issue`.")
        return
    # What is no terminal is kept by somebody: a log is no place for a key, so the lines read it where it lies.
    typer.echo(welcome(first, model, None if sys.stdout.isatty() else settings.bootstrap_path))


def welcome(first: dict[str, str], model: str, key_file: Path | None = None) -> str:
    """Ready-to-paste lines for both dialects; at temperature 0, since a model this small is easily led astray.

    key_file: bootstrap.json, for lines that read the key there and don't show it.
    """
    base, account, key = first["base_url"], first["account_id"], first["api_key"]
    python_key, opening = f'"{key}"', ""
    if key_file is not None:
        key = f"""$(sed -n 's/.*"api_key": *"\\([^"]*\\)".*/\\1/p' {shlex.quote(str(key_file))})"""
        python_key, opening = f'json.load(open({str(key_file)!r}))["api_key"]', "import json\n"
    question = "What is the capital of France?"
    messages = f'"messages":[{{"role":"user","content":"{question}"}}],"max_tokens":64,"temperature":0'
    headers = f'-H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
    return f"""
Pagegate is ready at {base}

# Workers AI, with curl
curl -N {base}/client/v4/accounts/{account}/ai/run/{model} \\
  {headers} \\
  -d '{{{messages},"stream":true}}'

# OpenAI, with curl
curl -N {base}/v1/chat/completions \\
  {headers} \\
  -d '{{"model":"{model}",{messages},"stream":true}}'

# OpenAI, with Python (pip install openai)
{opening}from openai import OpenAI
client = OpenAI(base_url="{base}/v1", api_key={python_key})
answer = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "{question}"}}], max_tokens=64, temperature=0)
print(answer.choices[0].message.content)

# Workers AI, with Python (pip install cloudflare)
{opening}from cloudflare import Cloudflare
client = Cloudflare(base_url="{base}/client/v4", api_token={python_key})
print(client.ai.run("{model}", account_id="{account}", prompt="{question}", max_tokens=64, temperature=0))

Keys and account id are in bootstrap.json of the data folder. Stop with Ctrl-C.
"""


def _public_host(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104 - a comparison, not a bind
