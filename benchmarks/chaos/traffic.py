"""Clients that ask the same requests again and again, and the answers that they got when nothing was wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.chaos.mix import Asked, with_stop
from benchmarks.chaos.stream import Stream, follow
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target

TIMEOUT_S = 90.0  # a client that has waited so long counts as hung
_AFTER_FAILURE_S = 0.2  # a client waits, as real ones do


@dataclass(slots=True)
class Traffic:
    """One client for each request. `answers` grows with every request, and each fills up as it comes."""

    target: Target
    requests: Sequence[Asked]
    reference: dict[str, Stream]  # by the request's name
    timeout_s: float = TIMEOUT_S
    answers: list[Stream] = field(default_factory=list)

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """All clients at work until the end of the block; then each has its last answer to the end."""
        is_over = asyncio.Event()
        clients = [asyncio.create_task(self._client(asked, is_over)) for asked in self.requests]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*clients)

    async def once(self) -> list[Stream]:
        """Every request once, all at the same time."""
        return list(await asyncio.gather(*map(self.ask, self.requests)))

    async def _client(self, asked: Asked, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            answer = await self.ask(asked)
            if not answer.is_complete:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def ask(self, asked: Asked) -> Stream:
        """One request, to the end of its answer."""
        stream = Stream(asked.name, begun_s=time.perf_counter())
        self.answers.append(stream)
        await follow(stream, self.target, asked.body, timeout_s=self.timeout_s)
        return stream


async def with_reference(target: Target, requests: Sequence[Asked]) -> Traffic:
    """Ask everything while nothing is wrong, twice; gives the kind `stop` its stop strings.

    Raises:
        BenchmarkError: an answer is not whole, or is another one the second time.
    """
    plain = await _answers(target, requests)
    given = [with_stop(asked, plain[asked.name].texts[0]) if asked.kind == "stop" else asked for asked in requests]
    reference, again = await _answers(target, given), await _answers(target, given)
    for name, stream in reference.items():
        if stream.said != again[name].said:
            raise BenchmarkError(f"request {name!r} is answered differently each time, with no fault made")
    return Traffic(target, given, reference)


async def _answers(target: Target, requests: Sequence[Asked]) -> dict[str, Stream]:
    streams = await Traffic(target, requests, {}).once()
    for stream in streams:
        if not stream.is_complete:
            raise BenchmarkError(f"request {stream.name!r} was not answered: {stream.outcome}: {stream.error}")
    return {stream.name: stream for stream in streams}
