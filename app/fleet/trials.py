"""Requests that may be what kills replicas, tried one after another so that none of them is lost with another."""

from __future__ import annotations

import asyncio


class Trials:
    """At most one request on trial at a time: from its turn to its first token, or until it is lost again.

    What `app/engine/isolation.py` does by halves within a step: a replica cannot say which of its requests killed it,
    but of those that were there without a token, the one that kills the next replica alone is it.
    """

    def __init__(self, *, longest_s: float = 2.0) -> None:
        """A trial that takes `longest_s` lets the next begin: it waits in a queue, or has much to compute."""
        self._longest_s = longest_s
        self._turn = asyncio.Lock()
        self._request_id: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self, request_id: str) -> None:
        """Wait for this request's turn."""
        await self._turn.acquire()
        self._request_id = request_id
        self._timer = asyncio.get_running_loop().call_later(self._longest_s, self.end, request_id)

    def end(self, request_id: str) -> None:
        """The request has a token, or is lost, or has waited for too long. Nothing happens when it is not on trial."""
        if request_id == self._request_id:
            assert self._timer is not None, "whoever is on trial has a limit"
            self._timer.cancel()
            self._request_id = None
            self._turn.release()
