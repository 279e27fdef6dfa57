"""GET and POST /admin/scheduler: show and switch the strategy and policy of replicas without a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import ConfigDict, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.endpoints.admin import Answers
from app.api.handler import RequestHandler
from app.api.http.body import read_json_object
from app.api.http.guard import reservation_of
from app.api.http.operations import BODY_REFUSALS, Operation, RouteGroup
from app.api.schemas.fields import Schema
from app.config import Policy, PolicyConfig, SchedulerConfig, Strategy, StrategyConfig, names_of
from app.errors import NotFound
from app.json_pieces import Json

CHOICES = {
    "strategies": names_of(SchedulerConfig.model_fields["strategy"]),
    "policies": names_of(SchedulerConfig.model_fields["policy"]),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaScheduling:
    """The scheduling that is in force on one replica."""

    replica_id: str
    group: str
    scheduler: SchedulerConfig
    switched_at: float | None  # seconds of wall time; None for the deployed scheduling


class SchedulerSwitch(Protocol):
    """Switches the scheduling of all replicas of one model."""

    async def in_force(self) -> Answers[ReplicaScheduling]:
        """Ask all replicas for the scheduling that is in force."""
        ...

    async def switch(self, strategy: StrategyConfig | None, policy: PolicyConfig | None) -> Answers[ReplicaScheduling]:
        """Switch all replicas at their next step. Returns once the switch is in force.

        None means the deployed strategy or policy.
        """
        ...


def _named(kinds: Sequence[str]) -> WithJsonSchema:
    """Return the JSON schema of a name, or of an object with a name and parameters."""
    by_name = {"type": "object", "properties": {"name": {"enum": [*kinds]}}, "required": ["name"]}
    return WithJsonSchema({"anyOf": [{"enum": [*kinds]}, by_name]})


class SchedulerChange(Schema):
    """The body of POST /admin/scheduler. An omitted strategy or policy is reset to the deployed one."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    strategy: Annotated[Strategy | None, _named(CHOICES["strategies"])] = None
    policy: Annotated[Policy | None, _named(CHOICES["policies"])] = None


class SchedulerRoutes(RouteGroup):
    """The routes of `/admin/scheduler`, for admins."""

    def __init__(self, handler: RequestHandler, switches: Mapping[str, SchedulerSwitch]) -> None:
        """`switches` maps model names to switches. A model without an entry cannot be switched."""
        self._handler = handler
        self._switches = switches

    @Operation("get", "/admin/scheduler", "The strategy and policy of each replica", "SchedulerList")
    async def show(self, request: Request) -> Response:
        entries = [_entry(model, await switch.in_force()) for model, switch in self._switches.items()]
        return JSONResponse({"object": "list", "data": entries, **CHOICES})

    @Operation(
        "post", "/admin/scheduler", "Switch the strategy and policy of a model's replicas", "Scheduler",
        (*BODY_REFUSALS, "503"), (SchedulerChange,),
    )  # fmt: skip
    async def switch(self, request: Request) -> Response:
        """Switch one model, and respond with the scheduling that is then in force."""
        body = await read_json_object(request, self._handler.limits, self._handler.threads)
        change = SchedulerChange.checked(body)
        model = self._handler.names.model(change.model, reservation_of(request).account).name
        if model not in self._switches:
            raise NotFound(f"this process has no replicas of {model!r} to switch", param="model")
        return JSONResponse(_entry(model, await self._switches[model].switch(change.strategy, change.policy)))


def _entry(model: str, answers: Answers[ReplicaScheduling]) -> Json:
    replicas = sorted(answers.reports, key=lambda each: each.replica_id)
    return {"model": model, "replicas": [_described(each) for each in replicas], "missing": answers.num_missing}


def _described(replica: ReplicaScheduling) -> Json:
    return {
        "replica": replica.replica_id,
        "group": replica.group,
        "switched_at": replica.switched_at,
        **replica.scheduler.model_dump(include={"strategy", "policy"}),
    }
