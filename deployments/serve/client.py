"""One model's replicas as the API sees them: `generate`, facts, and whether anybody answers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Literal

from ray.serve.handle import DeploymentHandle

from app.api import Cascade, ServedModel
from app.config import CascadeConfig, ServedModelConfig
from app.engine.request import Generate, ModelFacts, Pooling, Request, TokenDelta
from app.errors import CarouselError, Failure, Overloaded
from app.fleet import Board, Fleet, FleetMetrics, Limits, Patience
from app.fleet.dispatch import Group, GroupChooser, make_policy
from app.text import Tokenizer
from app.text.tool_calls import FORMATS, ToolFormat, format_of
from deployments.serve import boards
from deployments.serve.calls import ServeCalls, apart
from deployments.serve.errors import to_carousel_error
from deployments.serve.settings import deployment_name

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 3.0


class ModelClient:
    """All replicas of one model, seen through their handle."""

    def __init__(
        self,
        model: ServedModelConfig,
        handle: DeploymentHandle,
        transport: Literal["frames", "per_request"],
        metrics: FleetMetrics,
    ) -> None:
        """The handle must not have been used yet: its router asks for the board once."""
        replicas = model.replicas
        board = Board(
            make_policy(replicas.dispatch.model_dump(), random.Random()),
            GroupChooser([Group(group.name, group.share) for group in replicas.groups]),
            block_size=model.engine.cache.block_size,
            clock=time.monotonic,
        )
        boards.post(deployment_name(model), board)
        # The router and the board share this loop, whatever mode Serve runs in: neither has locks.
        handle._init(_run_router_in_separate_loop=False)
        self._handle = handle
        self.generate: Generate
        if transport == "frames":
            limits = Limits(
                max_resumes=replicas.max_resumes,
                place_timeout_s=replicas.place_timeout_s,
                patience=Patience(silence_s=replicas.silence_timeout_s, step_s=replicas.step_timeout_s),
            )
            self.generate = Fleet(ServeCalls(handle, uuid.uuid4().hex), board, limits, metrics).generate
        else:
            self.generate = CallPerRequest(handle, board).generate

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


async def served_model(model: ServedModelConfig, path: str, client: ModelClient) -> ServedModel:
    """The model as `app.api` wants it. `path` is resolved. Waits until a replica is there."""
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
        pooling=None if model.pooling == "none" else Pooling(model.pooling),
        group_header=model.replicas.group_header,
        session_header=model.replicas.session_header,
    )


def cascades_of(configs: Iterable[CascadeConfig], models: Iterable[ServedModel]) -> list[Cascade]:
    """The cascades over these models, which have those that the configs name."""
    by_name = {model.name: model for model in models}
    return [
        Cascade(
            name=config.name,
            small=by_name[config.small],
            large=by_name[config.large],
            min_mean_logprob=config.min_mean_logprob,
        )
        for config in configs
    ]


def _tool_format(parser: str, tokenizer: Tokenizer) -> ToolFormat | None:
    return format_of(tokenizer) if parser == "auto" else FORMATS.get(parser)


class CallPerRequest:
    """Every request streams its tokens through a call of its own, as Serve has it. What frames are compared with."""

    def __init__(self, handle: DeploymentHandle, board: Board) -> None:
        self._streaming = handle.options(stream=True)
        self._board = board

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """Stream the tokens of `request` from the replica that takes it; closing the stream aborts it there.

        Raises a CarouselError, whatever went wrong.
        """
        self._board.expect(request)
        response = apart(self._streaming.generate.remote, request)
        try:
            async for delta in response:
                self._board.progress(request.request_id, len(delta.token_ids))
                yield delta
        except Exception as error:
            raise _logged(to_carousel_error(error), error, request.request_id) from error
        finally:
            self._board.end(request.request_id)
            # Cancelling a call that has failed raises its error once more, as Serve's.
            with suppress(Exception):
                response.cancel()


def _logged(shown: CarouselError, error: Exception, request_id: str) -> CarouselError:
    """The client hears `shown`; what happened on our side goes to the log."""
    if isinstance(shown, Failure):
        logger.warning("request %s failed: %s: %s", request_id, type(error).__name__, error)
    return shown
