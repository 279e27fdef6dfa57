"""The messages that are to go out when batches end, in the store's database: written down before they are sent."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from app.jobs.job import Status
from app.jobs.line import Json
from app.jobs.service import NewWebhook

SCHEMA = """
CREATE TABLE IF NOT EXISTS letters (batch_id PRIMARY KEY, id, url, secret, state, event, ended_at, num_attempts,
    due_at, reason);
CREATE INDEX IF NOT EXISTS letters_by_due_at ON letters (due_at);
"""


class LetterState(StrEnum):
    """`waiting` for the batch's end → `pending` → `delivered` | `given_up`."""

    WAITING = "waiting"
    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLetter:
    """A message for the end of a batch; to the default receiver where none is named."""

    id: str
    receiver: NewWebhook | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A message of which the receiver has not said yet that it arrived."""

    id: str
    batch_id: str
    owner: str
    receiver: NewWebhook | None
    event: str
    ended_at: int  # when the batch did, in seconds since 1970
    num_attempts: int  # the one that was taken included


class Letters:
    """The table. Changes that belong to a batch's are made in the transaction that is open."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, batch_id: str, new: NewLetter) -> None:
        """For a new batch. Part of a transaction."""
        url, secret = (new.receiver.url, new.receiver.secret) if new.receiver else (None, None)
        self._connection.execute(
            "INSERT INTO letters (batch_id, id, url, secret, state, num_attempts) VALUES (?, ?, ?, ?, ?, 0)",
            (batch_id, new.id, url, secret, LetterState.WAITING.value),
        )

    def batch_ended(self, batch_id: str, status: Status, at: int) -> None:
        """From now on its letter, if there is one, is to be sent. Part of a transaction."""
        self._connection.execute(
            "UPDATE letters SET state = ?, event = ?, ended_at = ?, due_at = ? WHERE batch_id = ? AND state = ?",
            (LetterState.PENDING.value, f"batch.{status.value}", at, at, batch_id, LetterState.WAITING.value),
        )

    def take(self, now: float, until: float, limit: int, being_sent: Mapping[str, int]) -> list[Letter]:
        """The letters that are due, each as one more attempt; due again at `until`. A transaction of its own.

        Owners of whom the fewest are `being_sent` go first, so that nobody waits behind all the letters of another. An
        attempt counts before it is made: what dies in it comes again, and whatever it was cannot come for ever.
        """
        due = self._connection.execute(
            """SELECT batch_id, owner, due_at, turn FROM
               (SELECT batch_id, owner, due_at, row_number() OVER (PARTITION BY owner ORDER BY due_at) AS turn
                FROM letters JOIN batches ON batches.id = batch_id WHERE due_at <= ?) WHERE turn <= ?""",
            (now, limit),
        ).fetchall()
        due.sort(key=lambda row: (being_sent.get(row["owner"], 0) + row["turn"], row["due_at"]))
        owners = {row["batch_id"]: row["owner"] for row in due[:limit]}
        rows = self._connection.execute(
            f"""UPDATE letters SET num_attempts = num_attempts + 1, due_at = ?
                WHERE batch_id IN ({_marks(owners)}) RETURNING *""",
            (until, *owners),
        ).fetchall()
        return [_letter(row, owners[row["batch_id"]]) for row in rows]

    def num_pending(self) -> int:
        """Letters that are to be sent, now or later."""
        query = "SELECT count(*) FROM letters WHERE state = ?"
        [number] = self._connection.execute(query, (LetterState.PENDING.value,)).fetchone()
        return int(number)

    def next_due_at(self) -> float | None:
        """When there is something to do again."""
        [due_at] = self._connection.execute("SELECT min(due_at) FROM letters").fetchone()
        return None if due_at is None else float(due_at)

    def put_off(self, letter: Letter, until: float, reason: str) -> None:
        """An attempt has failed; there is another one at `until`."""
        self._connection.execute(
            "UPDATE letters SET due_at = ?, reason = ? WHERE batch_id = ?", (until, reason, letter.batch_id)
        )

    def end(self, letter: Letter, state: LetterState, reason: str | None = None) -> None:
        """No more attempts. What was for the receiver only is forgotten."""
        self._connection.execute(
            "UPDATE letters SET state = ?, reason = ?, due_at = NULL, url = NULL, secret = NULL WHERE batch_id = ?",
            (state.value, reason, letter.batch_id),
        )

    def shown(self, batch_ids: Sequence[str]) -> dict[str, Json]:
        """What clients see of their batches' letters, by batch."""
        query = f"SELECT batch_id, id, state, num_attempts, reason FROM letters WHERE batch_id IN ({_marks(batch_ids)})"
        return {row["batch_id"]: _shown(row) for row in self._connection.execute(query, batch_ids)}


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _letter(row: Any, owner: str) -> Letter:
    return Letter(
        id=row["id"],
        batch_id=row["batch_id"],
        owner=owner,
        receiver=None if row["url"] is None else NewWebhook(url=row["url"], secret=row["secret"]),
        event=row["event"],
        ended_at=row["ended_at"],
        num_attempts=row["num_attempts"],
    )


def _shown(row: Any) -> Json:
    return {
        "id": row["id"],
        "status": row["state"],
        "attempts": row["num_attempts"],
        "last_error": row["reason"],
    }
