"""One try to have a request served by one replica."""

from __future__ import annotations

import asyncio

from app.engine.request import Request, TokenDelta, merge_deltas
from app.errors import CarouselError, DeviceFault, EngineStopped


class Lost(Exception):
    """The replica that had the request will say no more about it; another one can go on."""

    def __init__(self, message: str, *, reason: str) -> None:
        """`reason` is one word for metrics; the message is for the log."""
        super().__init__(message)
        self.reason = reason


class Attempt:
    """What has arrived of one try and is not read yet. Its id is its own: what is meant for another never gets here."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.replica_id: str | None = None  # where it was sent
        self.is_trusted = False  # nothing was wrong with that replica then
        self.is_accepted = False  # that replica has queued it
        self.has_ended = False
        self.is_done = False  # it ended by a stop or its limit, and its reader has seen it
        self.sending: asyncio.Task[None] | None = None  # the call to the replica, open until the request ends there
        self._deltas: list[TokenDelta] = []
        self._error: CarouselError | Lost | None = None
        self._reader: asyncio.Future[None] | None = None  # its one reader, while it waits

    @property
    def attempt_id(self) -> str:
        return self.request.request_id

    def placed(self, replica_id: str, *, is_trusted: bool) -> None:
        """It was sent to a replica, which may still refuse it; `is_trusted`: nothing was known to be wrong with it."""
        self.replica_id = replica_id
        self.is_trusted = is_trusted

    def put(self, delta: TokenDelta) -> None:
        """The replica has something to say; nothing counts after an end."""
        if self.has_ended:
            return
        self.is_accepted = True
        self.has_ended = delta.finish_reason is not None
        if delta.error is not None:
            # An engine that stops, or a device that fails on everything, says nothing about the request.
            is_its_own = not isinstance(delta.error, EngineStopped | DeviceFault)
            self._error = delta.error if is_its_own else Lost(str(delta.error), reason="engine_failed")
            delta = delta._replace(finish_reason=None, error=None)
        if self._error is None or delta.token_ids:
            self._deltas.append(delta)
        self._wake_reader()

    def fail(self, error: CarouselError | Lost) -> None:
        """It ends without the replica's word."""
        if not self.has_ended:
            self.has_ended = True
            self._error = error
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> TokenDelta:
        """Everything that has accumulated, as one delta; an error comes after the tokens before it.

        Raises:
            Lost: the replica is gone.
            CarouselError: the replica refused the request, or it ended with an error.
        """
        if not self._deltas and self._error is None:
            # Not an Event: this is waited for at every token, and a bare future costs half.
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            return merge_deltas(deltas)
        assert self._error is not None, "an attempt is woken by a delta or an error"
        raise self._error
