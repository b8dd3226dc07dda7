"""The words of batches and the rule by which one goes from state to state. Pure.

Used by the stores and the runner, and shown by the dialects. Times are Unix nanoseconds.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class FormName(StrEnum):
    """Whose words a batch came in: how its lines are read and its answers written."""

    OPENAI = "openai"
    WORKERS_AI = "workers_ai"
    BACKGROUND = "background"  # one run of Workers AI, told to a webhook


class BatchState(StrEnum):
    """OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"  # its file could not be read: nothing ran
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchState.FAILED, BatchState.COMPLETED, BatchState.EXPIRED, BatchState.CANCELLED})
CANCELLABLE = frozenset({BatchState.VALIDATING, BatchState.IN_PROGRESS})


# Why nothing more of a batch runs, as OpenAI lists errors.
STOPPED: Final[dict[str, Any]] = {
    "code": "batches_full",
    "line": None,
    "message": "This request was not run: the account's batches have no room for what it would say. "
    "Delete files of answers that were read, or wait until their time is over, and send it again.",
    "param": None,
}


class LineState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"  # with its batch, before it ran
    EXPIRED = "expired"  # with its batch, before it ran


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. id: its public name. key_id: of the key that made it, by whose limits its lines run.

    expires_at_ns: what has not begun by then never will. answers_kept_s: how long its answers are kept after its end.
    errors: of the file, as OpenAI lists them; or why nothing more of it runs. webhook: the endpoint that is told of the
    end. owner: the process that works on it, while its lease lasts. Tokens are those of the lines that have ended.
    stored_bytes: what lines that have not ended ask, and what the others say; of a file that is being read, its size.
    """

    id: str
    account_id: str
    key_id: str
    form: FormName
    endpoint: str
    model: str
    input_file_id: str | None
    state: BatchState
    completion_window: str
    created_at_ns: int
    expires_at_ns: int
    answers_kept_s: int
    in_progress_at_ns: int | None = None
    finalizing_at_ns: int | None = None
    completed_at_ns: int | None = None
    failed_at_ns: int | None = None
    expired_at_ns: int | None = None
    cancelling_at_ns: int | None = None
    cancelled_at_ns: int | None = None
    kept_until_ns: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    webhook: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    metadata: dict[str, str] | None = None
    lines: int = 0
    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    owner: str | None = None
    lease_until_ns: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NewLine:
    """custom_id: its maker's name for it. body: the request, JSON in the words of its form."""

    number: int
    custom_id: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class Line:
    """A line that runs. request_id: of this attempt, fixed before it begins; attempts: those before it that failed.

    answer: what it will say, kept before its usage record ends: no line is charged whose answer can be lost.
    """

    batch_id: str
    account_id: str
    number: int
    custom_id: str | None
    body: bytes
    request_id: str
    attempts: int
    answer: bytes | None = None


def state_after(state: BatchState, *, undone: int, expired: int) -> BatchState:
    """Where a batch goes by itself. undone: its lines that wait or run; expired: those that never ran for lateness.

    A batch that is being cancelled ends as cancelled, whatever the hour. Nothing leaves an ended state.
    """
    if undone or state in ENDED or state is BatchState.VALIDATING:
        return state
    if state is BatchState.CANCELLING:
        return BatchState.CANCELLED
    if expired:
        return BatchState.EXPIRED
    return BatchState.COMPLETED if state is BatchState.FINALIZING else BatchState.FINALIZING


def end_of_waiting(state: BatchState, *, now_ns: int, expires_at_ns: int, stopped: bool) -> LineState | None:
    """What becomes of the lines that still wait; None while they may run. stopped: there is no room for answers."""
    if state is BatchState.CANCELLING:
        return LineState.CANCELLED
    if state is BatchState.IN_PROGRESS and now_ns >= expires_at_ns:
        return LineState.EXPIRED
    if state is BatchState.IN_PROGRESS and stopped:
        return LineState.FAILED
    return None
