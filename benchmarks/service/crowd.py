"""Clients in a process of their own, beside those that are measured: idle connections, and streams.

Every answer is thrown away, and what that costs is not in the times of the others.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.harness.http_call import Target, call
from deployments.open_files import allow_many_files

WAITS = "waits"  # neither an answer nor an error
_AT_ONCE = 100  # new connections: fewer than any queue of a listening socket
_PATIENCE_S = 10.0  # with an answer that is made at once
_NICENESS = 15  # that of Ray's workers
_LEAVES = "leave"


class Crowd:
    """The crowd, for the process that measures. Each method returns when all is done, with outcomes by their number.

    An outcome is a status, an error of the connection, or `waits`.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def connect(self, number: int) -> Counter[str]:
        """Open more connections, and keep those open on which one small answer has come. Stops when one gets none."""
        return self._told("connect", number)

    def ask_again(self) -> Counter[str]:
        """A small answer on each open connection, so that it does not count as left; closes those without one."""
        return self._told("ask_again")

    def hang_up(self, number: int) -> Counter[str]:
        """Close so many of the connections that do nothing, or all that there are."""
        return self._told("hang_up", number)

    def stream(self, number: int) -> Counter[str]:
        """Begin so many streams, which begin again when they end. Returns when each has a first token, or none."""
        return self._told("stream", number)

    def _told(self, *what: object) -> Counter[str]:
        self._pipe.send(what)
        found: Counter[str] = self._pipe.recv()
        return found


@contextmanager
def crowd(target: Target, request: bytes) -> Iterator[Crowd]:
    """A process for the length of the block; all its connections end with it. request: that of each stream."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_live, args=(theirs, target, request), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Crowd(ours)
    finally:
        with suppress(OSError):
            ours.send((_LEAVES,))
        process.join()


def _live(pipe: Connection, target: Target, request: bytes) -> None:
    os.nice(max(0, _NICENESS - os.nice(0)))
    allow_many_files()
    asyncio.run(_Members(target, request).obey(pipe))


class _Members:
    """The crowd itself."""

    def __init__(self, target: Target, request: bytes) -> None:
        self._target = target
        self._request = request
        self._small = f"GET /health HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n\r\n".encode()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._streams: list[asyncio.Task[None]] = []

    async def obey(self, pipe: Connection) -> None:
        """Do as told until told to leave, or until the process that tells it has ended."""
        methods = {each.__name__: each for each in (self.connect, self.ask_again, self.hang_up, self.stream)}
        with suppress(EOFError):
            while True:
                name, *arguments = await asyncio.to_thread(pipe.recv)
                if name == _LEAVES:
                    break
                pipe.send(await methods[name](*arguments))
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    async def connect(self, number: int) -> Counter[str]:
        """See `Crowd`."""
        outcomes = Counter[str]()
        while outcomes.total() < number and set(outcomes) <= {"200"}:
            here = min(_AT_ONCE, number - outcomes.total())
            outcomes.update(await asyncio.gather(*(_outcome(self._open()) for _ in range(here))))
        return outcomes

    async def ask_again(self) -> Counter[str]:
        """See `Crowd`."""
        asked, self._idle = self._idle, []
        outcomes = Counter[str]()
        for first in range(0, len(asked), _AT_ONCE):
            some = asked[first : first + _AT_ONCE]
            outcomes.update(await asyncio.gather(*(_outcome(self._ask(*connection)) for connection in some)))
        return outcomes

    async def hang_up(self, number: int) -> Counter[str]:
        """See `Crowd`."""
        closed, self._idle = self._idle[:number], self._idle[number:]
        for _, writer in closed:
            writer.close()
        return Counter(closed=len(closed))

    async def stream(self, number: int) -> Counter[str]:
        """See `Crowd`."""
        firsts = [asyncio.get_running_loop().create_future() for _ in range(number)]
        self._streams += [asyncio.create_task(self._keep_streaming(first)) for first in firsts]
        return Counter(await asyncio.gather(*(_outcome(_of(first)) for first in firsts)))

    async def _keep_streaming(self, first: asyncio.Future[str]) -> None:
        while True:
            try:
                await call(self._target, self._request, _Thrown(first))
            except OSError as error:
                if not first.done():
                    first.set_result(type(error).__name__)
                await asyncio.sleep(1.0)

    async def _open(self) -> str:
        return await self._ask(*await asyncio.open_connection(self._target.host, self._target.port))

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        try:
            writer.write(self._small)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
            await reader.readexactly(int(fields.get(b"content-length", b"0")))
        except BaseException:
            writer.close()
            raise
        status = head.split(b" ", 2)[1].decode()
        self._idle.append((reader, writer))
        return status


async def _of(first: asyncio.Future[str]) -> str:
    return await first


async def _outcome(asking: Coroutine[Any, Any, str]) -> str:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await asking
    except TimeoutError:
        return WAITS
    except (OSError, EOFError) as error:
        return type(error).__name__


class _Thrown:
    """A `Reader` that keeps nothing, and says when the first of an answer is there."""

    def __init__(self, first: asyncio.Future[str]) -> None:
        self._first = first
        self._status = ""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Reader`."""
        self._status = str(status)

    def body(self, data: bytes, *, at_s: float) -> None:
        """See `Reader`."""
        if not self._first.done():
            self._first.set_result(self._status)
