"""Batches and lines for tests."""

from gateway.batches.batch import Batch, BatchState, FormName, NewLine
from gateway.batches.store import Order


def batch(batch_id: str, *, account: str = "a" * 32, state: BatchState = BatchState.IN_PROGRESS) -> Batch:
    return Batch(
        id=batch_id,
        account_id=account,
        key_id="key",
        form=FormName.OPENAI,
        endpoint="/v1/chat/completions",
        model="model",
        input_file_id=None,
        state=state,
        completion_window="24h",
        created_at_ns=0,
        expires_at_ns=10**18,
        answers_kept_s=60,
    )


def order(lines: int, *, form: FormName = FormName.OPENAI, window_s: int = 86_400, body: bytes = b"{}") -> Order:
    return Order(
        key_id="key",
        form=form,
        endpoint="/v1/chat/completions",
        model="model",
        completion_window="24h",
        window_s=window_s,
        answers_kept_s=3_600,
        lines=[NewLine(number, f"line-{number}", body) for number in range(lines)],
    )
