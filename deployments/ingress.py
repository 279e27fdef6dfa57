"""The ingress deployment: `app.api` over handles to the replicas. No torch here, ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from app.api.completions import ServedModel
from app.api.routes import build_app
from app.config import ApplicationConfig, ServedModelConfig
from app.engine.facts import ModelFacts
from app.engine.request import Request, TokenDelta
from app.errors import CarouselError, Failure, Overloaded
from app.text.tokenizer import Tokenizer
from deployments.errors import to_carousel_error
from deployments.logs import log_where_serve_does
from deployments.loopback import keep_calls_on_loopback
from deployments.metrics import IngressReport, MetricsCollector

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 3.0
READY_CACHE_S = 1.0


class Ingress:
    """One HTTP process. Comes up only when every model has told its facts."""

    def __init__(
        self, config: ApplicationConfig, paths: Mapping[str, str], handles: Mapping[str, DeploymentHandle]
    ) -> None:
        """`paths` are resolved model paths, `handles` the replica deployments, both by the model's name."""
        log_where_serve_does()
        keep_calls_on_loopback()
        self._config = config
        self._paths = paths
        self._fleets = {name: Fleet(handle) for name, handle in handles.items()}
        self._metrics = MetricsCollector(handles, config.metrics)
        self._ready_until = 0.0
        self._ready_lock = asyncio.Lock()

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve after the constructor; waits for a replica of every model."""
        models = [await self._served_model(model) for model in self._config.models]
        metrics = self._metrics
        return build_app(models, self._config.api, self._is_ready, metrics=metrics.requests, expose=metrics.expose)

    def metrics_report(self) -> IngressReport:
        """What this process has measured, for the ingress that was asked for all of it."""
        return self._metrics.report()

    async def _served_model(self, model: ServedModelConfig) -> ServedModel:
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, self._paths[model.name], revision=model.engine.model.revision
        )
        fleet = self._fleets[model.name]
        facts = await fleet.facts()
        logger.info("model %s: context %d, vocabulary %d", model.name, facts.max_model_len, facts.vocab_size)
        return ServedModel(
            name=model.name, tokenizer=tokenizer, facts=facts, generate=fleet.generate, created=int(time.time())
        )

    async def _is_ready(self) -> bool:
        """Whether every model has a replica that answers, or may sleep until the first request wakes it.

        A yes holds for a moment; callers share one question.
        """
        async with self._ready_lock:
            if time.monotonic() >= self._ready_until:
                # To ask a model that sleeps would wake it.
                awake = [self._fleets[model.name] for model in self._config.models if not model.replicas.may_sleep]
                answers = await asyncio.gather(*(fleet.answers() for fleet in awake))
                self._ready_until = time.monotonic() + READY_CACHE_S if all(answers) else 0.0
            return time.monotonic() < self._ready_until


class Fleet:
    """All replicas of one model, seen through its handle. `generate` is the `Generate` seam of the API."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """Stream the tokens of `request` from the replica that takes it; closing the stream aborts it there.

        Raises a CarouselError, whatever went wrong.
        """
        response = self._streaming.generate.remote(request)
        try:
            async for delta in response:
                yield delta
        except Exception as error:
            raise _logged(to_carousel_error(error), error, request.request_id) from error
        finally:
            # Cancelling a call that has failed raises its error once more, as Serve's.
            with suppress(Exception):
                response.cancel()

    async def facts(self) -> ModelFacts:
        """What the model's replicas know of it. Waits until one is there; raises when they cannot start."""
        facts: ModelFacts = await self._handle.facts.remote()
        return facts

    async def answers(self) -> bool:
        """Whether a replica answers now. One that is full does: it says so."""
        try:
            await asyncio.wait_for(self.facts(), READY_TIMEOUT_S)
        except Exception as error:
            return isinstance(to_carousel_error(error), Overloaded)
        return True


def _logged(shown: CarouselError, error: Exception, request_id: str) -> CarouselError:
    """The client hears `shown`; what happened on our side goes to the log."""
    if isinstance(shown, Failure):
        logger.warning("request %s failed: %s: %s", request_id, type(error).__name__, error)
    return shown
