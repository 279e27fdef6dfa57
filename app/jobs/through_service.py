"""A bulk run through a service that runs already: its idle slots, its model, its way of failing over. No Ray here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice

from app.errors import Failure, InvalidSetup
from app.jobs.executors import Sender
from app.jobs.http_client import Service, ServiceGone
from app.jobs.input_files import Input, read_piece
from app.jobs.preparation import RowSettings
from app.jobs.progress import Summary
from app.jobs.questions import Question, ask
from app.jobs.record import Record
from app.jobs.results import OutputFolder
from app.jobs.runner import BulkJob, ReadingBroke

ROWS_IN_A_BATCH = 128
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Which service, and how much of it."""

    base_url: str
    api_key: str | None
    model: str | None  # of rows that name none
    max_under_way: int
    patience_s: float  # how long a service that does not answer is waited for


def answer_rows(found: Input, folder: OutputFolder, rows: RowSettings, settings: ServiceSettings) -> Summary:
    """Give every row its record and finish the folder.

    Raises:
        InvalidSetup: there is no such model, or the API key is not known.
        Failure: the output cannot be written, or the service stays away.
    """
    job = BulkJob[Question](folder)
    if len(folder.settled) < found.num_rows:
        asyncio.run(_run(job, found, folder, rows, settings))
    return job.finish()


async def _run(
    job: BulkJob[Question], found: Input, folder: OutputFolder, rows: RowSettings, settings: ServiceSettings
) -> None:
    async with Service(settings.base_url, settings.api_key) as service:
        _check_model(await _models(service, settings.patience_s), settings.model)
        sender = Sender(
            job.backlog,
            job,
            service,
            max_under_way=settings.max_under_way,
            patience_s=settings.patience_s,
        )

        async def source() -> Generator[list[Question | Record], None, None]:
            return _questions(found, folder, rows, settings.model)

        await job.run(sender, source)


async def _models(service: Service, patience_s: float) -> frozenset[str]:
    """The service's models, once it answers. Raises Failure when it does not."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await service.models()
        except ServiceGone as gone:
            if time.monotonic() >= deadline:
                raise Failure(f"the service has not answered for {patience_s:g} s: {gone}") from gone
        await asyncio.sleep(LOOK_EVERY_S)


def _check_model(served: frozenset[str], model: str | None) -> None:
    if model is not None and model not in served:
        raise InvalidSetup(f"--model {model}: the service has {', '.join(sorted(served)) or 'no model'}")


def _questions(
    found: Input, folder: OutputFolder, settings: RowSettings, model: str | None
) -> Generator[list[Question | Record], None, None]:
    """Batches of what the rows ask that are not settled. Raises ReadingBroke when a file cannot be read."""
    try:
        for piece in found.pieces:
            if folder.settled.has_all(piece.first_number, piece.num_rows):
                continue
            rows = (row for row in read_piece(piece) if row.number not in folder.settled)
            while some := [ask(row, settings, model=model) for row in islice(rows, ROWS_IN_A_BATCH)]:
                yield some
    except (OSError, ValueError) as error:  # Arrow's errors are among them
        raise ReadingBroke(str(error)) from error
