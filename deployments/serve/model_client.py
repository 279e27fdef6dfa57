"""Connects the API to a model's replicas."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid

from ray.serve.handle import DeploymentHandle

from app.api import ServedModel
from app.config import ServedModelConfig
from app.engine.request import Generate, ModelInfo
from app.errors import Overloaded
from app.fleet import FailoverLimits, Fleet, FleetMetrics, ReplicaRegistry
from app.fleet.dispatch import GroupChooser, make_policy
from app.text import Tokenizer, marks_of
from app.text.tool_calls import FORMATS, ToolFormat, format_of
from deployments.ray_internals import route_in_this_loop
from deployments.serve.settings import groups_of, pooling_of
from deployments.serve.transport import ServeTransport, to_carousel_error

logger = logging.getLogger(__name__)


# By deployment name. Serve constructs the routers and cannot pass them a registry, so they look it up here.
_registries: dict[str, ReplicaRegistry] = {}


def registry_of(deployment: str) -> ReplicaRegistry | None:
    """Return a deployment's registry, or None if this process does not send requests to the deployment."""
    return _registries.get(deployment)


class ModelClient:
    """All replicas of a model, behind their deployment's handle."""

    def __init__(self, model: ServedModelConfig, handle: DeploymentHandle, metrics: FleetMetrics) -> None:
        """`handle` must be unused, because its router looks up the registry only once, on first use."""
        replicas = model.replicas
        registry = ReplicaRegistry(
            make_policy(replicas.dispatch, random.Random()),
            GroupChooser([] if replicas.prefill_replicas else groups_of(model)),
            has_roles=replicas.prefill_replicas is not None,
            block_size=model.engine.cache.block_size,
            clock=time.monotonic,
        )
        _registries[model.deployment_name] = registry
        # Neither the registry nor the router uses locks, so the router must run on this event loop.
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

    async def model_info(self) -> ModelInfo:
        """Return the model info once a replica is running. Raises if the replicas cannot start."""
        model_info: ModelInfo = await self._handle.facts.remote()
        return model_info

    async def answers(self) -> bool:
        """Return whether a replica responds within three seconds. A refusal by full replicas also counts."""
        ready_timeout_s = 3.0
        try:
            await asyncio.wait_for(self.model_info(), ready_timeout_s)
        except Exception as error:
            return isinstance(to_carousel_error(error), Overloaded)
        return True


async def served_model(model: ServedModelConfig, path: str, client: ModelClient) -> ServedModel:
    """Return the model for `app.api` once a replica is running. `path` is the model's resolved folder."""
    tokenizer = await asyncio.to_thread(Tokenizer.load, path, revision=model.engine.model.revision)
    form = await asyncio.to_thread(_tool_format, model.tool_parser, tokenizer)
    model_info = await client.model_info()
    logger.info("model %s: context %d, vocabulary %d", model.name, model_info.max_model_len, model_info.vocab_size)
    return ServedModel(
        name=model.name,
        tokenizer=tokenizer,
        model_info=model_info,
        generate=client.generate,
        created=int(time.time()),
        aliases=model.aliases,
        tool_format=form,
        reasoning_marks=marks_of(tokenizer),
        pooling=pooling_of(model, model_info),
        deadline_s=model.deadline_s,
        prices=model.prices,
    )


def _tool_format(parser: str, tokenizer: Tokenizer) -> ToolFormat | None:
    return format_of(tokenizer) if parser == "auto" else FORMATS.get(parser)
