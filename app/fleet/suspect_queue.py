"""Requests that may have killed replicas are tried one after another, so that no other is lost together with one."""

from __future__ import annotations

import asyncio


class SuspectQueue:
    """At most one suspected request is tried at a time: from its turn to its first token, or until it is lost again.

    A dead replica cannot say which of its requests killed it. Of those that had no token there, the one that kills the
    next replica alone is the cause. (`app/engine/isolation.py` does the same by halves within a step.)
    """

    def __init__(self, *, longest_s: float = 2.0) -> None:
        """After `longest_s` the next request begins: the one before waits in a queue, or has much to compute."""
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
        """The request has a token, or is lost, or took too long. Nothing happens when it is not its turn."""
        if request_id == self._request_id:
            assert self._timer is not None, "a request that has its turn has a limit"
            self._timer.cancel()
            self._request_id = None
            self._turn.release()
