"""A row as a service is asked it: the body of an HTTP request in the lowest class, passed on as it stands.

Nothing is tokenized or checked here that the service checks itself: what it refuses, it refuses with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidRequest
from app.jobs.preparation import Row, RowSettings, question_of, seed_of
from app.jobs.record import Record

# In OpenAI's API the tier of those who can wait. Here: idle slots only, never queued, preempted first.
LOWEST_CLASS = {"service_tier": "flex"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a row asks of a service."""

    number: int
    row_id: str
    url: str  # as batch lines have it: /v1/chat/completions or /v1/completions
    body: Mapping[str, Any]

    def failed(self, reason: str) -> Record:
        """The record of this row when it has no answer."""
        return Record(row=self.number, id=self.row_id, error=reason)


def ask(row: Row, settings: RowSettings, *, model: str | None) -> Question | Record:
    """What a row asks; `model` is whom a row means that names none. A row that cannot be asked is a Record already."""
    if row.fields is None:
        return Record(row=row.number, id=row.row_id, error=row.error)
    try:
        url, body = question_of(row.fields, settings)
        _check_fits_bulk(body)
    except InvalidRequest as error:
        return Record(row=row.number, id=row.row_id, error=error.message)
    defaults = {"seed": seed_of(row.row_id)} | ({} if model is None else {"model": model})
    return Question(number=row.number, row_id=row.row_id, url=url, body=defaults | body | LOWEST_CLASS)


def _check_fits_bulk(body: Mapping[str, Any]) -> None:
    """What the API can do and a record cannot hold: it has one text, and nobody reads along."""
    if body.get("stream"):
        raise InvalidRequest(
            "stream is true; a row of a bulk run has nobody to stream to: leave it out", param="stream"
        )
    if body.get("n", 1) != 1:
        raise InvalidRequest(f"n is {body['n']!r:.40}; a row has one answer: write a row for each", param="n")
