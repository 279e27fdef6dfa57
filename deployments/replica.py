"""The replica deployment: one engine behind Serve's handle. Thin: it adds no behaviour to the engine."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from ray import serve

from app.assembly import build_engine
from app.config import EngineConfig
from app.engine.facts import ModelFacts
from app.engine.request import Request, TokenDelta
from app.engine.stats import EngineStats
from app.metrics import ReplicaReport
from deployments.autoscaling import use_of
from deployments.logs import log_where_serve_does
from deployments.loopback import keep_calls_on_loopback
from deployments.settings import retuned


class Replica:
    """One Serve actor with one device and one engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the weights and start the engine. Raises InvalidSetup when the model cannot be served as configured."""
        log_where_serve_does()
        keep_calls_on_loopback()
        self._deployed = config.scheduler
        self._engine = build_engine(config)
        gc.collect()
        gc.freeze()  # what was loaded stays: no later collection need look at it

    async def reconfigure(self, user_config: object) -> None:
        """Called by Serve with the deployment's `user_config`: `{"scheduler": {...}}`, see `settings.retuned`.

        Returns once the settings hold, so that Serve calls the deployment healthy when every replica has them. No
        request is lost. Raises InvalidSetup when they cannot; Serve's status then has the reason.
        """
        await self._engine.reconfigure(retuned(self._deployed, user_config))

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """Stream the tokens of `request`. Closing the stream aborts the request and frees its blocks."""
        deltas = cast(AsyncGenerator[TokenDelta, None], self._engine.generate(request))
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta

    def facts(self) -> ModelFacts:
        """What the engine knows about its model."""
        return self._engine.facts

    def stats(self) -> EngineStats:
        """A snapshot of the engine."""
        return self._engine.stats()

    def metrics_report(self) -> ReplicaReport:
        """What the engine counts and measures, for /metrics."""
        return ReplicaReport(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            stats=self._engine.stats(),
            measurements=self._engine.measurements(),
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve about once a second, for the autoscaling policy."""
        return use_of(self._engine.stats(), self._engine.measurements())

    def check_health(self) -> None:
        """Called by Serve; raises when the engine no longer runs, and Serve replaces this replica."""
        self._engine.check_health()

    def __del__(self) -> None:
        # Serve calls this once, after the replica has drained; it also runs when the constructor has failed.
        if hasattr(self, "_engine"):
            self._engine.shutdown()
