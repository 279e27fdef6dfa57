"""Stores the messages about batches in the catalog's database. A message is stored when its batch is created."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

from app.webhooks.client import WebhookMessage
from app.webhooks.receiver import WebhookReceiver

SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (batch_id PRIMARY KEY, id, url, secret, state, event, ended_at, num_attempts,
    due_at, reason);
CREATE INDEX IF NOT EXISTS messages_by_due_at ON messages (due_at);
"""


class DeliveryState(StrEnum):
    """The state of a message: `waiting` until the batch ends, then `pending`, then `delivered` or `given_up`."""

    WAITING = "waiting"
    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


class WebhookOutbox:
    """The table of messages. Call `add` and `batch_ended` inside the transaction that changes the batch."""

    def __init__(self, connection: sqlite3.Connection, transaction: Callable[[], AbstractContextManager[None]]) -> None:
        """`transaction` begins a transaction in the catalog and raises OSError if this process may not write."""
        self._connection = connection
        self._transaction = transaction

    def add(self, batch_id: str, receiver: WebhookReceiver | None) -> None:
        """Add the message for a new batch. `receiver` is None for the default receiver."""
        url, secret = (receiver.url, receiver.secret) if receiver else (None, None)
        self._connection.execute(
            "INSERT INTO messages (batch_id, id, url, secret, state, num_attempts) VALUES (?, ?, ?, ?, ?, 0)",
            (batch_id, f"evt_{uuid.uuid4().hex}", url, secret, DeliveryState.WAITING.value),
        )

    def batch_ended(self, batch_id: str, status: str, at: int) -> None:
        """Make an ended batch's message due, if it has one."""
        self._connection.execute(
            "UPDATE messages SET state = ?, event = ?, ended_at = ?, due_at = ? WHERE batch_id = ? AND state = ?",
            (DeliveryState.PENDING.value, f"batch.{status}", at, at, batch_id, DeliveryState.WAITING.value),
        )

    def take(self, now: float, until: float, limit: int, being_sent: Mapping[str, int]) -> list[WebhookMessage]:
        """Return at most `limit` due messages, count an attempt for each, and make them due again at `until`.

        Owners with the fewest messages in `being_sent` go first, so that no owner waits for all messages of another.
        Attempts are counted in advance, so that messages whose attempts crash the process are not retried forever.
        """
        with self._transaction():
            due = self._connection.execute(
                """SELECT batch_id, owner, due_at, turn FROM
                   (SELECT batch_id, owner, due_at, row_number() OVER (PARTITION BY owner ORDER BY due_at) AS turn
                    FROM messages JOIN batches ON batches.id = batch_id WHERE due_at <= ?)
                   WHERE turn <= ?""",
                (now, limit),
            ).fetchall()
            due.sort(key=lambda row: (being_sent.get(row["owner"], 0) + row["turn"], row["due_at"]))
            owners = {row["batch_id"]: row["owner"] for row in due[:limit]}
            rows = self._connection.execute(
                f"""UPDATE messages SET num_attempts = num_attempts + 1, due_at = ?
                    WHERE batch_id IN ({_marks(owners)}) RETURNING *""",
                (until, *owners),
            ).fetchall()
        return [_message(row, owners[row["batch_id"]]) for row in rows]

    def num_pending(self) -> int:
        """Return the number of messages about ended batches that will be sent now or later."""
        query = "SELECT count(*) FROM messages WHERE state = ?"
        [number] = self._connection.execute(query, (DeliveryState.PENDING.value,)).fetchone()
        return int(number)

    def next_due_at(self) -> float | None:
        """Return when the next message is due, in seconds since 1970, or None if no message waits to be sent."""
        [due_at] = self._connection.execute("SELECT min(due_at) FROM messages").fetchone()
        return None if due_at is None else float(due_at)

    def put_off(self, message: WebhookMessage, until: float, reason: str) -> None:
        """Schedule another attempt at `until`, after one failed for this reason."""
        with self._transaction():
            self._connection.execute(
                "UPDATE messages SET due_at = ?, reason = ? WHERE batch_id = ?", (until, reason, message.batch_id)
            )

    def end(self, message: WebhookMessage, state: DeliveryState, reason: str | None = None) -> None:
        """Set the final state of a message, and delete its URL and secret, which are no longer needed."""
        with self._transaction():
            self._connection.execute(
                "UPDATE messages SET state = ?, reason = ?, due_at = NULL, url = NULL, secret = NULL "
                "WHERE batch_id = ?",
                (state.value, reason, message.batch_id),
            )

    def shown(self, batch_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the `webhook` objects that clients see, by batch id."""
        query = (
            f"SELECT batch_id, id, state, num_attempts, reason FROM messages WHERE batch_id IN ({_marks(batch_ids)})"
        )
        return {row["batch_id"]: _shown(row) for row in self._connection.execute(query, batch_ids)}


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _message(row: Any, owner: str) -> WebhookMessage:
    return WebhookMessage(
        id=row["id"],
        batch_id=row["batch_id"],
        owner=owner,
        receiver=None if row["url"] is None else WebhookReceiver(url=row["url"], secret=row["secret"]),
        event=row["event"],
        ended_at=row["ended_at"],
        num_attempts=row["num_attempts"],
    )


def _shown(row: Any) -> dict[str, Any]:
    return {"id": row["id"], "status": row["state"], "attempts": row["num_attempts"], "last_error": row["reason"]}
