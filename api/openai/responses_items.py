"""GET …/responses/{id}/input_items: what a kept response was given, earlier turns first, as items with ids. Pure."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.errors import InputInvalid
from api.openai.files import listing


class InputItemsQuery(BaseModel):
    """Values arrive as text, so this one is not strict."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


def input_item_page(response_id: str, turns: list[dict[str, Any]], query: InputItemsQuery) -> dict[str, Any]:
    """turns: what was said up to the response's own output. Raises InputInvalid."""
    items = [_shown(item, f"{response_id}-in{place}") for place, item in enumerate(turns)]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise InputInvalid(("after",), "is no input item of this response.")
        items = items[places[-1] + 1 :]
    return listing(items[: query.limit], more=len(items) > query.limit)


def _shown(item: dict[str, Any], place: str) -> dict[str, Any]:
    """As it was sent, with what clients may leave out; an answer's item is whole already."""
    kind = item.get("type", "message")
    shown = {**item, "type": kind, "status": item.get("status") or "completed"}
    match kind:
        case "message":
            shown["content"] = _parts(item["role"], item.get("content"))
            prefix = "msg"
        case "reasoning":
            prefix = "rs"
        case "function_call":
            prefix = "fc"
        case _:
            prefix = "fco"
    return {**shown, "id": item.get("id") or f"{prefix}_{place}"}  # a client may send null for what it leaves out


def _parts(role: str, content: Any) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_part(role, part) for part in parts]


def _part(role: str, part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "refusal":
        return part
    if role == "assistant":
        return {"annotations": [], **part, "type": "output_text"}
    return {**part, "type": "input_text"}
