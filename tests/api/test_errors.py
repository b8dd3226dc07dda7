"""Every error has its row, and rows say what the dialects promise."""

from collections.abc import Iterator

import pytest

import backends.errors
import billing.errors
import gateway.errors
import tenancy.errors
from api.errors import INTERNAL, ROWS, ApiError, InputInvalid, dotted, row_of
from api.refusals import FORESEEN
from backends.errors import EngineTimeout
from billing.errors import RecordDelayed
from gateway.errors import GenerationFailed, ModelNotFound, PromptTooLong


def subclasses(base: type[Exception]) -> Iterator[type[Exception]]:
    for kind in base.__subclasses__():
        yield kind
        yield from subclasses(kind)


def has_a_row(kind: type[Exception]) -> bool:
    """One of its own, or that of a parent which says that it is shared."""
    if kind in ROWS:
        return True
    nearest = next((parent for parent in kind.__mro__ if parent in ROWS), None)
    return nearest is not None and ROWS[nearest].shared


@pytest.mark.parametrize("base", FORESEEN, ids=lambda base: base.__name__)
def test_every_error_class_has_a_row(base: type[Exception]) -> None:
    kinds = list(subclasses(base))
    assert kinds, "the base has subclasses"
    assert [kind.__name__ for kind in kinds if not has_a_row(kind)] == []


def test_a_class_nobody_gave_a_row_is_found_out() -> None:
    class Unheard(ApiError):
        pass

    assert not has_a_row(Unheard)


def test_every_base_of_the_packages_is_walked() -> None:
    bases = {
        ApiError,
        tenancy.errors.TenancyError,
        billing.errors.BillingError,
        gateway.errors.GatewayError,
        backends.errors.BackendError,
    }
    assert set(FORESEEN) == bases


def test_codes_of_classes_are_words() -> None:
    for base in FORESEEN:
        for kind in subclasses(base):
            code = kind.code  # type: ignore[attr-defined]  # every base declares one
            assert code == code.lower().replace(" ", "_")


def test_statuses_that_invite_a_retry_say_when_or_say_that_it_is_hopeless() -> None:
    for kind, row in ROWS.items():
        if row.status in {429, 502, 503, 504}:
            assert row.hopeless or row.retry_after_s, kind.__name__


def test_what_can_never_succeed_is_not_retried() -> None:
    assert row_of(PromptTooLong(prompt_tokens=9, limit_tokens=8)).hopeless


def test_what_has_run_and_is_charged_later_says_so_and_invites_no_retry() -> None:
    assert row_of(RecordDelayed()).hopeless
    assert "is charged" in RecordDelayed().message


def test_a_failed_generation_is_a_timeout_if_its_engine_timed_out() -> None:
    failed = GenerationFailed("the engine failed")
    assert row_of(failed).status == 502
    failed.__cause__ = EngineTimeout("silent for 30 s")
    assert row_of(failed).status == 504
    assert row_of(failed).workers_status == 408


def test_an_unforeseen_error_is_ours() -> None:
    assert row_of(ValueError("bug")) is INTERNAL


def test_dialects_differ_where_the_design_says_so() -> None:
    assert (row_of(ModelNotFound("x")).status, row_of(ModelNotFound("x")).workers_status) == (404, 400)


def test_paths_are_written_in_both_ways() -> None:
    error = InputInvalid(("messages", 1, "content"), "must be text.")
    assert error.param == "messages[1].content"
    assert error.message == "Invalid value at '/messages/1/content': must be text."
    assert dotted(()) == ""
    assert InputInvalid((), "must be an object.").param is None
