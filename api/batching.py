"""Puts files, batches and their runner together for one process. Called by the composition root."""

import time
from collections.abc import Callable
from functools import partial

import sqlalchemy as sa

from api.line_work import LineWork
from api.openai.batch_form import OpenAIForm
from api.openai.batch_input import BatchInput
from api.settings import Settings
from api.workers_ai.batch_form import WorkersForm
from billing.metering import Metering
from billing.store import UsageStore
from billing.webhooks.outbox import enqueue_one
from gateway.batches.batch import Batch, FormName
from gateway.batches.desk import Batching
from gateway.batches.files import FileStore
from gateway.batches.form import Form
from gateway.batches.runner import BatchRunner, RunnerParts
from gateway.batches.store import BatchStore
from gateway.batches.turns import has_room
from gateway.catalogue import TEXT_EMBEDDINGS, Catalogue
from gateway.embedding import Embeddings
from gateway.fleet import Fleet
from gateway.pipeline import Pipeline
from tenancy.database import Database


def open_batching(  # noqa: PLR0917 - made in one place, by the composition root
    settings: Settings,
    database: Database,
    metering: Metering,
    owner: str,
    fleet: Fleet,
    catalogue: Catalogue,
    pipeline: Pipeline,
    embeddings: Embeddings | None,
    *,
    wakes: Callable[[str], bool],
) -> Batching:
    """owner: a name of this process that stays the same when it starts again. wakes: would a request wake the model?"""
    chosen, clock = settings.batches, time.time_ns
    room = partial(_room, fleet, catalogue, embeddings, chosen.idle_share)
    work = LineWork(
        database=database,
        catalogue=catalogue,
        pipeline=pipeline,
        embeddings=embeddings,
        choices_max=settings.choices_max,
        answer_bytes_max=settings.gateway.answer_bytes_max,
        clock=clock,
        answers=partial(_answers, fleet, catalogue),
        wakes=wakes,
        room=room,
    )
    native = WorkersForm(work)
    forms: dict[FormName, Form] = {
        FormName.OPENAI: OpenAIForm(work),
        FormName.WORKERS_AI: native,
        FormName.BACKGROUND: native,
    }
    store = BatchStore(database, chosen, clock=clock, told=partial(_tell, clock))
    files = FileStore(
        database, clock=clock, account_bytes_max=chosen.account_bytes_max, account_files_max=chosen.account_files_max
    )
    runner = BatchRunner(
        RunnerParts(
            database=database,
            store=store,
            files=files,
            forms=lambda batch: forms[batch.form],
            reader=BatchInput,
            settings=chosen,
            owner=owner,
            room=room,
            recorded=metering.flush,
            event=UsageStore(database).request_record,
        )
    )
    return Batching(store, files, runner.wake, runner.figures, runner.run)


def _answers(fleet: Fleet, catalogue: Catalogue, model: str) -> bool:
    return catalogue.find(model) is not None and fleet.of(model).up


def _room(fleet: Fleet, catalogue: Catalogue, embeddings: Embeddings | None, idle_share: float, model: str) -> bool:
    """A model that is not served any more has room for nothing but its lines' refusal; one whose engines are all gone,
    for nothing but lines that fall back to another.
    """
    card = catalogue.find(model)
    if card is None:
        return True
    if card.task == TEXT_EMBEDDINGS:
        return embeddings is not None and embeddings.idle
    served = fleet.of(model)
    seen = [(replica, replica.snapshot) for replica in served.replicas if replica.known]
    if not seen:
        return not len(served.room)
    shares = [
        replica.free_pages / max(1, report.total_pages)
        for replica, report in seen
        if report is not None and not report.waiting  # in the engine's own queue
    ]
    return has_room(shares, waiting=len(served.room), idle_share=idle_share)


def _tell(clock: Callable[[], int], connection: sa.Connection, batch: Batch, answer: bytes) -> None:
    """Of the end of a run in the background, whoever it named, in the transaction of that end."""
    if batch.webhook is not None:
        enqueue_one(connection, batch.account_id, batch.webhook, batch.id, answer.decode(), clock())
