"""A bulk run through a service that runs already: its idle slots, its model, its way of failing over. No Ray here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice

from app.errors import Failure, InvalidSetup
from app.jobs.executors import OwnerSlots, RequestExecutor, ServiceGone, Window
from app.jobs.http_client import HttpClient
from app.jobs.input_files import InputRows, read_piece
from app.jobs.items import RowSettings, item_of
from app.jobs.job import InvalidItem, Item
from app.jobs.outputs import RecordFormat
from app.jobs.results import ItemSet
from app.jobs.run_folder import RunFolder, Summary, finish_run
from app.jobs.runner import JobRun, ReadingBroke, RunProgress, read_in_thread

ITEMS_IN_A_PIECE = 128
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Which service, and how much of it."""

    base_url: str
    api_key: str | None
    model: str | None  # of items that name none
    max_in_flight: int
    patience_s: float  # how long a service that does not answer is waited for


def run_through_service(found: InputRows, folder: RunFolder, rows: RowSettings, settings: ServiceSettings) -> Summary:
    """Answer every row and finish the folder.

    Raises:
        InvalidSetup: there is no such model, or the API key is not known.
        Failure: the output cannot be written, or the service stays away.
    """
    run = JobRun[Item](folder.results, RecordFormat(), progress=RunProgress(found.num_rows))
    return finish_run(folder, run, lambda: asyncio.run(_run(run, found, folder, rows, settings)))


async def _run(
    run: JobRun[Item], found: InputRows, folder: RunFolder, rows: RowSettings, settings: ServiceSettings
) -> None:
    client = HttpClient(settings.base_url, settings.api_key, model=settings.model, job_id=folder.name)
    async with client:
        _check_model(await _models(client, settings.patience_s), settings.model)
        executor = RequestExecutor(
            run,
            client,
            window=Window(settings.max_in_flight),
            slots=OwnerSlots(settings.max_in_flight),
            patience_s=settings.patience_s,
        )
        await run.run(executor, lambda: read_in_thread(_items(found, folder.results.ended, rows)))


async def _models(client: HttpClient, patience_s: float) -> frozenset[str]:
    """The service's models, once it answers. Raises Failure when it does not."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await client.models()
        except ServiceGone as gone:
            if time.monotonic() >= deadline:
                raise Failure(f"the service has not answered for {patience_s:g} s: {gone}") from gone
        await asyncio.sleep(LOOK_EVERY_S)


def _check_model(served: frozenset[str], model: str | None) -> None:
    if model is not None and model not in served:
        raise InvalidSetup(f"--model {model}: the service has {', '.join(sorted(served)) or 'no model'}")


def _items(found: InputRows, ended: ItemSet, settings: RowSettings) -> Generator[list[Item | InvalidItem], None, None]:
    """The items that have not ended, some at a time. Raises ReadingBroke when a file cannot be read."""
    try:
        for piece in found.pieces:
            if ended.has_all(piece.first_number, piece.num_rows):
                continue
            rows = (row for row in read_piece(piece) if row.number not in ended)
            while some := [item_of(row, settings) for row in islice(rows, ITEMS_IN_A_PIECE)]:
                yield some
    except (OSError, ValueError) as error:  # Arrow's errors are among them
        raise ReadingBroke(str(error)) from error
