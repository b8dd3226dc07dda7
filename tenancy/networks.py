"""Networks as settings have them: a list in a file, separated by commas in a variable."""

from typing import Annotated, Any

from pydantic import BeforeValidator, IPvAnyNetwork


def _one_per_comma(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Networks = Annotated[tuple[IPvAnyNetwork, ...], BeforeValidator(_one_per_comma)]
