"""The one reader of the environment: `PAGEGATE_*` variables and one TOML file become one frozen Settings value.

Read by the composition root and the command line; everything below gets its own part as an argument. A variable or key
that is unknown or malformed stops the start and is named. Order: variable, then file, then default.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from backends.checkpoints import default_cache_dir
from backends.round_trips import RegionName
from backends.settings import BackendSettings
from billing.settings import BillingSettings
from gateway.batches.settings import BatchSettings
from gateway.lifecycle.settings import LifecycleSettings
from gateway.regions import DEFAULT_REGION
from gateway.settings import GatewaySettings
from tenancy.networks import Networks
from tenancy.settings import TenancySettings

_PREFIX = "PAGEGATE_"
_MODEL_ID = re.compile(r"(@[a-z]+/)?([\w.-]+/)?[\w.-]+", re.ASCII)
_CONFIG = "PAGEGATE_CONFIG"
# One server, sentinels that know the primary by its name, or nodes of a cluster: tenancy/meters/servers.py.
_REDIS_URL = r"^(?:rediss?(?:\+cluster)?://[^,\s]+(?:,[^,/\s]+)*|rediss?\+sentinel://[^/\s]+/[\w.-]+|unix://\S+)?$"
# Its name in logs, metrics and usage records.
EMBEDDED_ENGINE = "engine-0"
SPOOL_OF_WORKER = "spool-"


class SettingsInvalid(ValueError):
    """Configuration that can't be used. The message names each variable or key and what is wrong with it."""


class Settings(BaseModel):
    """All settings. A nested one: `PAGEGATE_GATEWAY__QUEUE_ENTRIES_MAX`, or `queue_entries_max` under `[gateway]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    home: Path = Field(description="Data folder: database, durable records, pepper, bootstrap.json, engine log.")
    cache_dir: Path = Field(description="Where fetched checkpoints are kept, outside any checkout.")
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8787, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    region: RegionName = Field(
        default=DEFAULT_REGION, description="Where this gateway is, by the name that deployment files and accounts use."
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="Processes that serve the port; they need PostgreSQL and shared state."
    )
    database_url: str = Field(
        default="", description="SQLAlchemy URL; empty: SQLite in the data folder.", validate_default=True
    )
    meters_url: str = Field(
        default="",
        pattern=_REDIS_URL,
        description="Redis or Valkey that holds the live meters of several processes; empty: in this process.",
    )
    pages_url: str = Field(
        default="",
        pattern=_REDIS_URL,
        description="Redis or Valkey through which several gateways share the pages of engines; empty: one gateway.",
    )
    model_id: str = Field(
        default="@cf/huggingfacetb/smollm2-135m-instruct", min_length=1, description="Public id of the served model."
    )
    deployment: Path | None = Field(
        default=None,
        description="TOML file of the models to serve and their engines; without it one model on one engine.",
    )
    embedding_model_id: str = Field(
        default="@cf/sentence-transformers/all-minilm-l6-v2",
        description="Public id of the embedding model; empty: embeddings are not served.",
    )
    log_format: Literal["console", "json"] = Field(default="console", description="How log lines are written.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level logged.")
    trusted_proxies: Networks = Field(
        default=(), description="Networks whose X-Forwarded-For says where a request comes from, comma-separated."
    )
    body_bytes_max: int = Field(default=8 << 20, ge=1024, description="A larger request body is refused (413).")
    upload_seconds_max: float = Field(default=300.0, gt=0, description="A slower upload of a file is refused (408).")
    body_seconds_max: float = Field(default=30.0, gt=0, description="A slower request body is refused (408).")
    choices_max: int = Field(default=8, ge=1, le=128, description="The largest `n`.")
    drain_seconds_max: float = Field(default=30.0, ge=0, description="Running requests' time to end at shutdown.")
    backends: BackendSettings = Field(default_factory=BackendSettings, alias="engine")
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    batches: BatchSettings = Field(default_factory=BatchSettings)
    lifecycle: LifecycleSettings = Field(default_factory=LifecycleSettings)
    tenancy: TenancySettings = Field(default_factory=TenancySettings)
    billing: BillingSettings = Field(default_factory=BillingSettings)

    @model_validator(mode="before")
    @classmethod
    def _database_beside_home(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("database_url") and values.get("home"):
            return {**values, "database_url": f"sqlite:///{Path(values['home']).absolute()}/pagegate.db"}
        return values

    @model_validator(mode="after")
    def _one_place_says_what_is_served(self) -> Self:
        for name in ("url", "checkpoint"):
            if self.deployment is not None and getattr(self.backends, name) is not None:
                raise ValueError(f"engine.{name} says nothing beside a deployment file, which names its own engines")
        return self

    @model_validator(mode="after")
    def _several_workers_keep_what_one_promises(self) -> Self:
        """Limits, money and pages are promised to tenants, not to one process's part of them."""
        if self.workers == 1:
            return self
        missing = []
        if make_url(self.database_url).get_backend_name() == "sqlite":
            missing.append(
                "database_url names SQLite, which has one writer: PAGEGATE_DATABASE_URL must name PostgreSQL"
            )
        if not self.meters_url:
            missing.append("limits would be counted by each for itself: set PAGEGATE_METERS_URL to a Redis or Valkey")
        if not self.pages_url:
            missing.append("each would fill the engines by itself: set PAGEGATE_PAGES_URL to a Redis or Valkey")
        if "meters_processes" in self.tenancy.model_fields_set and self.tenancy.meters_processes < self.workers:
            missing.append("PAGEGATE_TENANCY__METERS_PROCESSES counts the workers of all machines, so it is no fewer")
        if missing:
            raise ValueError(f"PAGEGATE_WORKERS is {self.workers}, but " + "; ".join(missing))
        return self

    @field_validator("database_url")
    @classmethod
    def _database_is_known(cls, url: str) -> str:
        try:
            backend = make_url(url).get_backend_name()
        except ArgumentError:
            raise ValueError("is no database URL: sqlite:////path/file.db or postgresql+psycopg://…") from None
        if backend not in ("sqlite", "postgresql"):
            raise ValueError(f"names {backend}; sqlite and postgresql are served")
        return url

    @field_validator("model_id", "embedding_model_id")
    @classmethod
    def _model_id_has_its_parts(cls, model_id: str) -> str:
        if model_id and not _MODEL_ID.fullmatch(model_id):
            raise ValueError("is no model id: @cf/author/name, or author/name, or name")
        return model_id

    @property
    def embeds(self) -> bool:
        """Beside attached engines and those of a deployment file, only if an engine was named for it."""
        embedded = self.backends.url is None and self.deployment is None
        return bool(self.embedding_model_id) and (embedded or self.backends.embedding_url is not None)

    @property
    def sharers(self) -> int:
        """How many processes share meters and pages: those of this machine, unless more were named."""
        named = "meters_processes" in self.tenancy.model_fields_set
        return self.tenancy.meters_processes if named else self.workers

    def spool_dir(self, worker: int = 1) -> Path:
        """The durable record of one worker. A gateway that serves alone is worker 1."""
        return self.home / ("spool" if worker == 1 else f"{SPOOL_OF_WORKER}{worker}")

    @property
    def pepper_path(self) -> Path:
        return self.home / "pepper"

    @property
    def bootstrap_path(self) -> Path:
        return self.home / "bootstrap.json"

    @property
    def engine_log_path(self) -> Path:
        """Of the embedded engine."""
        return self.home / f"{EMBEDDED_ENGINE}.log"


def load_settings(environ: Mapping[str, str] | None = None, *, chosen: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment and the file it names (`PAGEGATE_CONFIG`, else pagegate.toml in the data folder).

    chosen: variables that a command line sets. Raises SettingsInvalid.
    """
    environ = {**(os.environ if environ is None else environ), **(chosen or {})}  # noqa: TID251 - the one place that reads it
    variables = {name: value for name, value in environ.items() if name.startswith(_PREFIX)}
    config = variables.pop(_CONFIG, None)
    values = _nested(variables)
    if "home" not in values:
        values["home"] = _default_home(environ)
    file = Path(config) if config else Path(values["home"]) / "pagegate.toml"
    if config or file.exists():
        values = _merged(_read_file(file), values)
    if "cache_dir" not in values:
        values["cache_dir"] = _at_home("PAGEGATE_CACHE_DIR", partial(default_cache_dir, environ))
    for folder in ("home", "cache_dir"):
        values[folder] = Path(values[folder]).expanduser().absolute()
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsInvalid(_explained(error)) from error


def keep_tokenizers_single_threaded() -> None:
    """A library's only switch, so it is set here: one text gains nothing from the thread pool that `tokenizers` would
    start, and going there and back costs as much CPU as tokenising a short prompt.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251 - as above


def _default_home(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_DATA_HOME")
    return _at_home("PAGEGATE_HOME", lambda: (Path(base) if base else Path.home() / ".local" / "share") / "pagegate")


def _at_home(variable: str, folder: Callable[[], Path]) -> Path:
    """A folder in the user's home directory. Raises SettingsInvalid if there is none, as for some services."""
    try:
        return folder()
    except RuntimeError as error:
        raise SettingsInvalid(f"There is no home directory: {variable} must say which folder to use.") from error


def _nested(variables: Mapping[str, str]) -> dict[str, Any]:
    """`PAGEGATE_GATEWAY__QUEUE_ENTRIES_MAX=8` becomes {"gateway": {"queue_entries_max": "8"}}."""
    values: dict[str, Any] = {}
    for name, value in variables.items():
        *tables, key = name.removeprefix(_PREFIX).lower().split("__")
        table = values
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise SettingsInvalid(f"{name} and another variable contradict each other.")
        table[key] = value
    return values


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsInvalid(f"The configuration file {path} can't be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"The configuration file {path} is not TOML: {error}.") from error


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_tables else value
    return merged


def _explained(error: ValidationError) -> str:
    """One line a fault, naming the variable; values are left out, since some are secrets."""
    lines = []
    for fault in error.errors(include_input=False, include_url=False):
        path = [str(part) for part in fault["loc"]]
        variable = _PREFIX + "__".join(path).upper()
        text = "is not a setting" if fault["type"] == "extra_forbidden" else fault["msg"].removeprefix("Value error, ")
        if not path:  # of several settings, which it names itself
            lines.append(f"{text}.")
            continue
        lines.append(f"{variable} (in a file: {'.'.join(path)}): {text}.")
    return "\n".join(lines)
