"""What the pages of usage and of the log are filtered by, as their forms send it."""

from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator

from api.console.schemas import EndUser, Name, Tag
from billing.summaries import UsageFilter


def _blank(value: object) -> object:
    """A field that was left empty in a form says nothing."""
    return None if value == "" else value


MAYBE: Final = BeforeValidator(_blank)


class FilterQuery(BaseModel):
    model: Annotated[Name | None, MAYBE] = None
    key: Annotated[Name | None, MAYBE] = None
    outcome: Annotated[Name | None, MAYBE] = None
    project: Annotated[Name | None, MAYBE] = None
    end_user: Annotated[EndUser | None, MAYBE] = None
    tag: Annotated[Tag | None, MAYBE] = None

    @property
    def only(self) -> UsageFilter:
        return UsageFilter(
            model=self.model,
            key_id=self.key,
            outcome=self.outcome,
            project_id=self.project,
            end_user=self.end_user,
            tag=self.tag,
        )
