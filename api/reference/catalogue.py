"""What the routes about models, usage and tokens answer, and those for orchestrators. Pure shapes."""

from typing import Final

from api.reference.document import Good, Told, answer
from api.reference.errors import KEY, PATH, QUERY, STORES, VERIFY
from api.reference.generated import envelope
from api.reference.shapes import (
    COUNT,
    DAY,
    FLAG,
    INSTANT,
    NUMBER,
    TEXT,
    UNIX_SECONDS,
    USD,
    Shape,
    listed,
    one_of,
    or_null,
    record,
    ref,
)
from api.workers_ai.schemas import SchemaQuery, SearchQuery, UsageQuery
from billing.errors import PriceUnavailable
from gateway.errors import ModelNameInvalid, ModelNotFound, ModelRetired

_PER_TOKEN: Final = {"type": "string", "description": "US dollars per token, exact."}
_PRICING: Final = record({"input_cache_read": _PER_TOKEN}, prompt=_PER_TOKEN, completion=_PER_TOKEN)
_TASK: Final = record(id=TEXT, name=TEXT, description=TEXT)
_PAGES: Final = record(page=COUNT, per_page=COUNT, count=COUNT, total_count=COUNT, total_pages=COUNT)
_USED: Final = {
    "requests": COUNT, "prompt_tokens": COUNT, "cached_tokens": COUNT, "completion_tokens": COUNT,
    "reasoning_tokens": COUNT, "neurons": NUMBER, "cost": USD,
}  # fmt: skip

CATALOGUE_SCHEMAS: Final[dict[str, Shape]] = {
    "Model": record(
        {"deprecation_date": DAY},
        id=TEXT,
        object={"const": "model"},
        created=UNIX_SECONDS,
        owned_by=TEXT,
        context_length=COUNT,
        max_output_length=COUNT,
        pricing=_PRICING,
        precisions={"type": "object", "additionalProperties": TEXT},
    ),
    "FoundModel": record(
        id=TEXT,
        source={"enum": [1, 2]},
        name=TEXT,
        description=TEXT,
        task=_TASK,
        created_at=TEXT,
        tags=listed(TEXT),
        properties=listed(record(property_id=TEXT, value={"type": ["string", "array"]})),
    ),
    "OpenRouterModel": record(
        id=TEXT,
        name=TEXT,
        created=UNIX_SECONDS,
        hugging_face_id=or_null(TEXT),
        context_length=COUNT,
        max_output_length=COUNT,
        input_modalities=listed(TEXT),
        output_modalities=listed(TEXT),
        pricing=or_null(_PRICING),
        supported_features=listed(TEXT),
        supported_sampling_parameters=listed(TEXT),
    ),
}

_ASKING: Final = (*KEY, *PATH)
MODELS: Final = Told(
    "Models", (answer(record(object={"const": "list"}, data=listed(ref("Model")))),), (*_ASKING, *STORES)
)
MODEL: Final = Told(
    "Models",
    (answer(ref("Model")),),
    (*_ASKING, *STORES, ModelNotFound, ModelNameInvalid, ModelRetired, PriceUnavailable),
)
SEARCH: Final = Told(
    "Models",
    (
        answer(
            envelope(
                {"anyOf": [listed(ref("FoundModel")), record(data=listed(ref("OpenRouterModel")))]}, result_info=_PAGES
            )
        ),
    ),
    (*_ASKING, *QUERY),
    query=SearchQuery,
)
SCHEMA: Final = Told(
    "Models",
    (answer(envelope(record(input={"type": "object"}, output={"type": "object"}))),),
    (*_ASKING, *QUERY, ModelNotFound, ModelNameInvalid),
    query=SchemaQuery,
)
TASKS: Final = Told("Models", (answer(envelope(listed(_TASK), result_info=_PAGES)),), _ASKING)
AUTHORS: Final = Told("Models", (answer(envelope(listed(record(id=TEXT, name=TEXT)), result_info=_PAGES)),), _ASKING)
USAGE: Final = Told(
    "Usage",
    (
        answer(
            envelope(
                record(
                    {},
                    **{"from": INSTANT},
                    to=INSTANT,
                    group_by=listed(one_of("model", "day")),
                    totals=record(**_USED),
                    groups=listed(record({"model": TEXT, "day": DAY}, **_USED)),
                    truncated=FLAG,
                    today=record(
                        date=DAY,
                        neurons_used=NUMBER,
                        neurons_limit=or_null(NUMBER),
                        neurons_left=or_null(NUMBER),
                        resets_at=INSTANT,
                    ),
                )
            )
        ),
    ),
    (*_ASKING, *QUERY, *STORES),
    query=UsageQuery,
)
TOKEN: Final = Told("Keys", (answer(envelope(record(id=TEXT, status={"const": "active"}))),), (*VERIFY, *PATH))

_HEALTH: Final = record({"reason": TEXT}, status=TEXT)
LIVE: Final = Told("Operation", (answer(_HEALTH),), open=True)
READY: Final = Told("Operation", (answer(_HEALTH), answer(_HEALTH, status=503, description="Not ready.")), open=True)
METRICS: Final = Told("Operation", (Good({"text/plain": TEXT}, description="Prometheus's text format."),), open=True)
PAGE: Final = Told("Operation", (Good({"text/html": TEXT}, description="This reference."),), open=True)
