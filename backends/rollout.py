"""A new revision of a model beside the old one: the table `[models.rollout]` of a deployment file. Pure values.

A *revision* is the name that replicas and pairs of the file carry, such as `int4`; those without one are `stable`. It
stands for one checkpoint in one precision with one set of flags: what is changed gets another name. How requests are
shared and what is compared is the gateway's (gateway/rollouts).

    [models.rollout]
    revision = "int4"
    share_percent = 10
"""

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

STABLE: Final = "stable"


class Rollout(BaseModel):
    """How the new revision is tried. What is compared is counted on both, from the moment it begins."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$", description="The new one; the other serves until then.")
    share_percent: float = Field(
        gt=0,
        le=100,
        description="Of new conversations, so many go to the new revision. `pagegate rollout share` raises it.",
    )
    when_full: Literal["other", "wait"] = Field(
        default="other",
        description="A request whose revision has no room now goes to the other one, or waits for room at its own; what"
        " comes after it waits too. One that is down or asleep takes no share either way.",
    )
    requests_min: int = Field(default=500, ge=1, description="Of the new revision, before it can be found as good.")
    errors_more_percent: float = Field(
        default=1.0, ge=0, le=100, description="So many failed requests more, of a hundred, are still as good."
    )
    first_token_slower_percent: float = Field(
        default=20.0, ge=0, description="The time to the first token at the 90th percentile may be so much longer."
    )
    between_tokens_slower_percent: float = Field(
        default=20.0, ge=0, description="As well, the mean time between tokens."
    )
    answers_slower_percent: float = Field(
        default=20.0, ge=0, description="As well, the time by the token of answers that are not streamed."
    )
    evaluation_min: float | None = Field(
        default=None,
        description="The score that an evaluation outside must give the new revision (`pagegate rollout evaluated`):"
        " without it nothing is promoted by itself, and a lower one takes it back.",
    )
    promote: Literal["operator", "automatic"] = Field(
        default="operator", description="Who replaces the old revision once the new one is found as good."
    )
