"""One model's replicas as the API sees them: `generate`, facts, and whether a replica answers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid

from ray.serve.handle import DeploymentHandle

from app.api import ServedModel
from app.config import ServedModelConfig
from app.engine.request import Generate, ModelInfo, Pooling
from app.errors import InvalidSetup, Overloaded
from app.fleet import FailoverLimits, Fleet, FleetMetrics, ReplicaRegistry
from app.fleet.dispatch import GroupChooser, make_policy
from app.text import Tokenizer, marks_of
from app.text.tool_calls import FORMATS, ToolFormat, format_of
from deployments.ray_internals import route_in_this_loop
from deployments.serve.settings import groups_of
from deployments.serve.transport import ServeTransport, to_carousel_error

logger = logging.getLogger(__name__)


# By the name of the replica deployment. Routers find them here by import: Serve makes them and gives them nothing else.
_registries: dict[str, ReplicaRegistry] = {}


def registry_of(deployment: str) -> ReplicaRegistry | None:
    """The registry of a deployment; None when this process sends no requests to it."""
    return _registries.get(deployment)


class ModelClient:
    """All replicas of one model, seen through their handle."""

    def __init__(self, model: ServedModelConfig, handle: DeploymentHandle, metrics: FleetMetrics) -> None:
        """The handle must not have been used yet: its router looks for the registry once."""
        replicas = model.replicas
        registry = ReplicaRegistry(
            make_policy(replicas.dispatch, random.Random()),
            GroupChooser([] if replicas.roles else groups_of(model)),
            has_roles=replicas.roles is not None,
            block_size=model.engine.cache.block_size,
            clock=time.monotonic,
        )
        _registries[model.deployment_name] = registry
        # The router and the registry share this loop: neither has locks.
        route_in_this_loop(handle)
        self._handle = handle
        limits = FailoverLimits(
            place_timeout_s=replicas.place_timeout_s,
            silence_s=replicas.silence_timeout_s,
            step_s=replicas.step_timeout_s,
            drain_s=replicas.drain_timeout_s,
        )
        self.transport = ServeTransport(handle, uuid.uuid4().hex)
        self.fleet = Fleet(self.transport, registry, limits, metrics)
        self.generate: Generate = self.fleet.generate

    async def facts(self) -> ModelInfo:
        """What the model's replicas know of it. Waits until one is there; raises when they cannot start."""
        facts: ModelInfo = await self._handle.facts.remote()
        return facts

    async def answers(self) -> bool:
        """Whether a replica answers now. A refusal because it is full is an answer."""
        ready_timeout_s = 3.0
        try:
            await asyncio.wait_for(self.facts(), ready_timeout_s)
        except Exception as error:
            return isinstance(to_carousel_error(error), Overloaded)
        return True


async def served_model(model: ServedModelConfig, path: str, client: ModelClient) -> ServedModel:
    """The model as `app.api` needs it. `path` is resolved. Waits until a replica is there."""
    tokenizer = await asyncio.to_thread(Tokenizer.load, path, revision=model.engine.model.revision)
    form = await asyncio.to_thread(_tool_format, model.tool_parser, tokenizer)
    facts = await client.facts()
    logger.info("model %s: context %d, vocabulary %d", model.name, facts.max_model_len, facts.vocab_size)
    return ServedModel(
        name=model.name,
        tokenizer=tokenizer,
        facts=facts,
        generate=client.generate,
        created=int(time.time()),
        aliases=model.aliases,
        tool_format=form,
        reasoning_marks=marks_of(tokenizer),
        pooling=pooling_of(model, facts),
        deadline_s=model.deadline_s,
        prices=model.prices,
    )


def pooling_of(model: ServedModelConfig, facts: ModelInfo) -> Pooling | None:
    """What the embeddings of a model are; None: it gives none. Raises InvalidSetup for what it cannot give."""
    if model.pooling == "none" or facts.embedding_size is None:
        return None
    if model.pooling == "auto":
        return Pooling(facts.pooling or Pooling.LAST)
    if model.pooling == "cls" and facts.generates:
        raise InvalidSetup(f"pooling of {model.name}: got cls, the first token, which only an encoder has; use last")
    return Pooling(model.pooling)


def _tool_format(parser: str, tokenizer: Tokenizer) -> ToolFormat | None:
    return format_of(tokenizer) if parser == "auto" else FORMATS.get(parser)
