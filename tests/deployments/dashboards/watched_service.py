"""A service for Prometheus to scrape: the API over one engine that draws made-up tokens, without Ray."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from app.api import build_app
from app.engine.async_engine import AsyncEngine
from app.engine.request import Request, TokenDelta
from app.errors import Overloaded, StepFailed, Unavailable
from app.metrics import BatchCounts, EngineReport, LoopMonitor, Scrape, exposition
from app.text import Tokenizer
from tests.api.fakes import Service
from tests.benchmarks.servers import serving
from tests.fakes import CountingRunner, build_fake_engine


class Watched:
    """Everything that a scrape can show has happened once a call of `work` is over, and goes on with each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.engine = AsyncEngine(build_fake_engine(runner=CountingRunner(4)), max_requests=4)
        self.service = Service(tokenizer, generate=self._generate)
        self.loop = LoopMonitor()
        self.num_lines = 0
        self.demo = self.service.handler.metrics.model("demo")
        for error in (Unavailable("no replica"), Overloaded("full")):
            self.demo.refused(error)

    async def _generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        self.demo.dispatched("least_loaded")
        prompt = tuple(2 + token_id % 40 for token_id in request.prompt_token_ids)  # of the small vocabulary
        async for delta in self.engine.generate(replace(request, prompt_token_ids=prompt)):
            self.demo.frame_received(1)
            yield delta
            if request.session == "fails" and delta.token_ids:
                self.demo.resumed("connection_lost")
                raise StepFailed("this request is made to fail")

    async def metrics(self) -> bytes:
        """As an ingress answers, with this one replica."""
        report = EngineReport(
            replica_id="r1", stats=self.engine.stats(), measurements=self.engine.measurements(), loop=None
        )
        batches = BatchCounts(
            num_lines_completed=self.num_lines, num_lines_failed=0, num_webhook_attempts=self.num_lines,
            num_webhooks_delivered=self.num_lines, num_webhooks_given_up=0, num_webhooks_pending=0,
        )  # fmt: skip
        return exposition(
            Scrape(
                requests=[self.service.handler.metrics.snapshot()],
                replicas={"demo": [report]},
                loops={("ingress", "i1"): self.loop.snapshot()},
                batches=[batches],
            )
        )

    def work(self, base: str, *, num_too_many: int = 0) -> None:
        """Some requests of each kind, over HTTP; `num_too_many` at once more than the engine takes."""
        bodies = [
            ({"max_tokens": 4, "ignore_eos": True}, {}),
            ({"max_tokens": 4, "ignore_eos": True, "service_tier": "flex"}, {}),
            ({"max_tokens": 4, "ignore_eos": True, "stream": True}, {"x-carousel-session": "fails"}),
        ]
        for fields, headers in bodies:
            post(base, {"model": "demo", "prompt": "Hi"} | fields, headers)
        for _ in range(num_too_many):
            post(base, {"model": "demo", "prompt": ["Hi"] * 8, "max_tokens": 4}, {})
        self.num_lines += 1


def post(base: str, body: dict[str, object], headers: dict[str, str]) -> int:
    """The status of a call."""
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"} | headers
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextmanager
def served(watched: Watched) -> Iterator[str]:
    """The service at an address of this machine, which is returned."""

    async def is_ready() -> bool:
        return True

    app = build_app(watched.service.handler, is_ready, expose=watched.metrics)

    async def with_loop(scope: dict[str, object], receive: object, send: object) -> None:
        if not hasattr(watched.loop, "_loop"):
            watched.loop.start(names_causes=False)
        await app(scope, receive, send)  # type: ignore[arg-type]

    try:
        with serving(with_loop) as base:  # type: ignore[arg-type]
            yield base
    finally:
        watched.engine.shutdown()
