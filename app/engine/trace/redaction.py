"""Redacts a step log, so that it shows lengths and equal prefixes, but no texts.

Each full block of a request's tokens is replaced by a keyed hash (BLAKE2b). Because the prefix cache compares whole
blocks, equal prefixes stay equal. Each log has a random key that is never written, so readers cannot hash guesses to
compare them. Salts and tenants are hashed with the same key.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterable
from typing import Any

from app.engine.request import Request
from app.engine.trace.entries import (
    NOTHING,
    Abort,
    Arrival,
    Entry,
    OutputHashes,
    RedactedArrival,
    ScheduledTokens,
    StepRecord,
    request_fields,
)

_KEPT = ("request_id", "sampling", "priority", "deadline_s", "is_background", "pooling", "num_scored_tokens")


class Redactor:
    """Redacts the entries of one log. The entries must be passed in order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._key = secrets.token_bytes(32)
        # For each request that has not ended, its tokens after the blocks hashed at arrival, by request number.
        self._tokens: dict[int, array[int]] = {}
        self._scheduled = NOTHING  # the scheduled tokens of the previous step

    def redacted(self, entry: Entry) -> Iterable[Entry]:
        """Return the entries to write instead of `entry`, in order."""
        match entry:
            case Arrival():
                return (self._arrival(entry),)
            case Abort():
                return (entry, *self._output_hashes([entry.number]))
            case StepRecord():
                return self._step(entry)
        return (entry,)

    def _arrival(self, arrival: Arrival) -> RedactedArrival:
        request = arrival.request
        tokens = array("q", (*request.prompt_token_ids, *request.generated_token_ids))
        hashes = self._hashes(tokens)
        self._tokens[arrival.number] = tokens[len(hashes) * self._block_size :]
        fields = {name: value for name, value in request_fields(request).items() if name in _KEPT}
        fields["sampling"] = self._sampling(fields["sampling"])
        fields |= {"num_prompt_tokens": len(request.prompt_token_ids), "block_hashes": hashes} | self._names(request)
        if request.generated_token_ids:
            fields["num_generated_tokens"] = len(request.generated_token_ids)
        return RedactedArrival(arrival.number, arrival.at, fields)

    def _sampling(self, given: dict[str, Any]) -> dict[str, Any]:
        """Hide the grammar's text and the bad words, but still show that the request has them."""
        hidden: dict[str, Any] = {}
        if "grammar" in given:
            hidden["grammar"] = given["grammar"] | {"text": self._hash(given["grammar"]["text"].encode())}
        if "bad_words" in given:
            hidden["bad_words"] = [[0] * len(word) for word in given["bad_words"]]
        return given | hidden

    def _names(self, request: Request) -> dict[str, str]:
        given = {"cache_salt": request.prefix_salt, "tenant": request.tenant}
        return {name: self._hash(text.encode()) for name, text in given.items() if text}

    def _step(self, record: StepRecord) -> tuple[Entry, ...]:
        before, self._scheduled = self._scheduled, self._scheduled_tokens(record)
        for number, token_id in record.drawn(self._scheduled, before):
            if number in self._tokens:
                self._tokens[number].append(token_id)
        return (record._replace(token_ids=()), *self._output_hashes(number for number, _ in record.ended))

    def _scheduled_tokens(self, record: StepRecord) -> ScheduledTokens:
        return self._scheduled.next_decode_step() if record.scheduled is None else record.scheduled

    def _output_hashes(self, numbers: Iterable[int]) -> list[OutputHashes]:
        """Return the entries for the outputs of requests that have just ended."""
        ended = ((number, self._hashes(self._tokens.pop(number, array("q")))) for number in numbers)
        return [OutputHashes(number, hashes) for number, hashes in ended if hashes]

    def _hashes(self, tokens: array[int]) -> list[str]:
        size = self._block_size
        return [self._hash(tokens[end - size : end].tobytes()) for end in range(size, len(tokens) + 1, size)]

    def _hash(self, content: bytes) -> str:
        return hashlib.blake2b(content, key=self._key, digest_size=8).hexdigest()
