"""Short words for the JSON Schemas of answers. Records are open: an answer may gain fields, which clients must bear."""

from typing import Any, Final

Shape = dict[str, Any]

TEXT: Final[Shape] = {"type": "string"}
FLAG: Final[Shape] = {"type": "boolean"}
COUNT: Final[Shape] = {"type": "integer", "minimum": 0}
INTEGER: Final[Shape] = {"type": "integer"}
NUMBER: Final[Shape] = {"type": "number"}
UNIX_SECONDS: Final[Shape] = {"type": "integer", "minimum": 0, "description": "Unix seconds."}
USD: Final[Shape] = {"type": "string", "pattern": r"^-?[0-9]+(\.[0-9]+)?$", "description": "US dollars, exact."}
NANO_USD: Final[Shape] = {"type": "integer", "description": "Billionths of a US dollar."}
NEURONS_TEXT: Final[Shape] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$", "description": "Neurons, exact."}
INSTANT: Final[Shape] = {"type": "string", "format": "date-time"}
DAY: Final[Shape] = {"type": "string", "format": "date"}


def record(optional: dict[str, Shape] | None = None, /, **fields: Shape) -> Shape:
    """An object with these fields, and perhaps with the optional ones."""
    return {"type": "object", "properties": {**fields, **(optional or {})}, "required": list(fields)}


def listed(items: Shape) -> Shape:
    return {"type": "array", "items": items}


def or_null(shape: Shape) -> Shape:
    kind = shape.get("type")
    if isinstance(kind, str) and "enum" not in shape:
        return {**shape, "type": [kind, "null"]}
    return {"anyOf": [shape, {"type": "null"}]}


def one_of(*values: str) -> Shape:
    return {"enum": list(values)}


def ref(name: str) -> Shape:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}
