"""GET /admin/keys and /admin/fleet: the usage of API keys and the state of replicas, without any keys or prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.auth.keys import Authenticator
from app.api.auth.limits import Account, Usage
from app.api.http.operations import Operation, RouteGroup
from app.json_pieces import Json
from app.usage import Used, UsedFor

ReportT = TypeVar("ReportT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """The report of one process that sends requests to replicas: an ingress or the batches process."""

    process: str
    usage: Mapping[str, Usage] = field(default_factory=dict)  # by key name
    used: Mapping[UsedFor, Used] = field(default_factory=dict)  # usage that the ledger may not contain yet
    replicas: Mapping[str, Sequence[Json]] = field(default_factory=dict)  # the replicas known to the process, by model


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(Generic[ReportT]):
    """The reports of the processes or replicas that answered in time, and the number that did not answer."""

    reports: Sequence[ReportT]
    num_missing: int = 0


Collect = Callable[[], Awaitable[Answers[ProcessReport]]]


class AdminRoutes(RouteGroup):
    def __init__(
        self,
        authenticator: Authenticator,
        collect: Collect,
        wanted_replicas: Callable[[], Awaitable[list[Json]]] | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._collect = collect
        self._wanted_replicas = wanted_replicas

    @Operation("get", "/admin/keys", "The usage of each API key", "AdminKeys")
    async def keys(self, request: Request) -> Response:
        """List the usage of each key, summed over all processes, and the limits of each key."""
        answers = await self._collect()
        entries = [
            _entry(account, [report.usage.get(account.name, Usage()) for report in answers.reports])
            for account in self._authenticator.accounts
        ]
        return _list(entries, answers)

    @Operation("get", "/admin/fleet", "Each process's view of the replicas", "AdminFleet")
    async def fleet(self, request: Request) -> Response:
        """List each process's view of each model's replicas. The views differ if the network is partitioned.

        `autoscaling` in the response lists the target number of replicas of each autoscaled model.
        """
        answers = await self._collect()
        entries = [
            {"process": report.process, "model": model, "replicas": list(replicas)}
            for report in answers.reports
            for model, replicas in sorted(report.replicas.items())
        ]
        wanted = [] if self._wanted_replicas is None else await self._wanted_replicas()
        return _list(entries, answers, autoscaling=wanted)


def usage_of(authenticator: Authenticator) -> dict[str, Usage]:
    """Return the usage that this process has counted, by key name."""
    return {account.name: account.usage for account in authenticator.accounts}


def only_this_process(authenticator: Authenticator) -> Collect:
    """Return a `Collect` that reports only this process."""

    async def collect() -> Answers[ProcessReport]:
        used = authenticator.pools.usage.uncounted()
        return Answers(reports=[ProcessReport(process="", usage=usage_of(authenticator), used=used)])

    return collect


def _list(entries: list[Json], answers: Answers[ProcessReport], **more: Any) -> Response:
    processes = {"answered": len(answers.reports), "missing": answers.num_missing}
    return JSONResponse({"object": "list", "data": entries, "processes": processes} | more)


def _entry(account: Account, of_processes: Sequence[Usage]) -> Json:
    key, usage = account.key, sum(of_processes, start=Usage())
    limits = (
        "requests_per_minute", "tokens_per_minute", "max_concurrency", "max_tokens", "tokens_per_day",
        "tokens_per_month", "money_per_month",
    )  # fmt: skip
    return {
        "name": account.name,
        "admin": account.may_administer,
        "models": list(key.models) if key else [],
        "requests": usage.num_requests,
        "refused": usage.num_refused,
        "running": usage.num_running,
        "tokens": usage.num_tokens,
        "limits": {name: getattr(key, name, None) for name in limits},
    }
