"""Hostile requests against the real service, and what honest clients feel of them.

    python -m benchmarks.service.fuzz --cases 100000 --rate 400

Starts the service as `make serve` does, with simulated replicas, and sends malformed, extreme and cut off requests to
every endpoint that takes JSON, and to pipelines, `--rate` a second, while honest clients stream. Times with and without
the attack take turns. Progress goes to stderr; the last line of stdout is one JSON object:

    outcomes            answers by status; `closed`: the connection ended without one; `hung_up`: the attacker did,
                        without one after 2 s, or 0.2 s where the request was cut off
    server_errors       answers of 500 and above, a 503 too
    restarts            processes of ingresses and replicas that were there before and not after
    honest_*_ms         from request to last token, of all honest requests in times of that kind; and how many failed
    ratio_p99           under attack over without
    resident_*_mib      memory of all ingresses and all replicas: before, and after each time with the attack

Exits with 1 when there was a server error, a restart or a failed honest request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from benchmarks.harness.answer import Answer, ask
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.figures import percentile
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import Process, resident_bytes
from benchmarks.harness.service import Service, service
from benchmarks.service.hostile_requests import HostileRequest, hostile_requests

MODEL_NAME = "simulated"
PIPELINES: list[dict[str, Any]] = [
    {"name": "alone", "steps": [{"kind": "generate", "model": MODEL_NAME}]},
    {"name": "careful", "steps": [{"kind": "cascade", "small": MODEL_NAME, "large": "alone"}]},
    {"name": "together", "steps": [{"kind": "ensemble", "models": [MODEL_NAME, "careful"]}]},
    {
        "name": "auto",
        "steps": [
            {
                "kind": "route",
                "by": "length",
                "cases": [{"model": "careful", "max_prompt_tokens": 20}, {"model": "together"}],
            }
        ],
    },
]
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # before an answer
PATIENCE_S = 2.0  # of an attacker with an answer
HONEST_TIMEOUT_S = 30.0
HONEST_TOKENS = 8
PATIENCE_OF_CUT_S = 0.2  # the same where a request was cut off: it hangs up itself
_PARTS = {"ingresses": "ray::ServeReplica:carousel:ingress", "replicas": "ray::ServeReplica:carousel:"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much, how fast."""

    cases: int
    models: Sequence[str] = ()  # that hostile requests name, beside those that name none
    rate: float  # hostile requests a second
    connections: int  # hostile ones at once, at most
    honest_rate: float
    window_s: float  # a time with the attack, and one without
    seed: int


@dataclass(slots=True)
class Tally:
    """What came of everything so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    server_errors: list[dict[str, str]] = field(default_factory=list)
    honest: dict[bool, list[Answer]] = field(default_factory=lambda: {False: [], True: []})  # under attack?
    attack_s: float = 0.0

    @property
    def num_cases(self) -> int:
        return self.by_kind.total()


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measured, arguments, is_bad=_is_bad)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    plan = Plan(
        cases=given.cases, models=[each["name"] for each in PIPELINES],
        rate=given.rate, connections=given.connections, honest_rate=given.honest_rate,
        window_s=given.window_s, seed=given.seed,
    )  # fmt: skip
    with service(application(given)) as running:
        return attack(running, plan)


def application(given: argparse.Namespace) -> dict[str, Any]:
    """The application's `args`."""
    return {
        "models": [
            {
                "name": MODEL_NAME,
                "engine": {"model": {"path": given.model, "simulated": {"step_ms": given.step_ms}}},
                "replicas": {"num_replicas": given.replicas, "num_cpus": 0.1, "drain_timeout_s": 5},
            }
        ],
        "pipelines": PIPELINES,
    }


def attack(running: Service, plan: Plan) -> dict[str, Any]:
    """Times with and without an attack by turns until all cases are sent; the figures of the page's docstring."""
    tally, cases = Tally(), hostile_requests(plan.seed, plan.models)
    before = running.processes()
    memory = [resident(before)]
    asyncio.run(_window(running.target, plan, Tally(), []))
    while tally.num_cases < plan.cases:
        asyncio.run(_window(running.target, plan, tally, []))
        num_cases = min(plan.cases - tally.num_cases, round(plan.rate * plan.window_s))
        asyncio.run(_window(running.target, plan, tally, list(islice(cases, num_cases))))  # made before they are timed
        memory.append(resident(running.processes()))
        tell(f"{tally.num_cases:,} of {plan.cases:,} cases, outcomes {dict(tally.outcomes)}")
    after = running.processes()
    return figures_of(tally, memory) | {"restarts": sorted(_ours(before) - _ours(after)), "seed": plan.seed}


def figures_of(tally: Tally, memory: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """All that is told but what the processes say."""
    times = {
        under_attack: [1000 * (answer.ended_s - answer.begun_s) for answer in answers if answer.has_succeeded]
        for under_attack, answers in tally.honest.items()
    }
    calm_p99, attacked_p99 = percentile(times[False], 99), percentile(times[True], 99)
    return {
        "cases": tally.num_cases,
        "cases_per_s": round(tally.num_cases / tally.attack_s, 1),
        "kinds": dict(tally.by_kind),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "server_errors": tally.server_errors[:20],
        "num_honest": {"calm": len(tally.honest[False]), "attacked": len(tally.honest[True])},
        "honest_failed": sum(not answer.has_succeeded for answers in tally.honest.values() for answer in answers),
        "honest_calm_p50_ms": percentile(times[False], 50),
        "honest_calm_p99_ms": calm_p99,
        "honest_attacked_p50_ms": percentile(times[True], 50),
        "honest_attacked_p99_ms": attacked_p99,
        "ratio_p99": None if not calm_p99 or attacked_p99 is None else round(attacked_p99 / calm_p99, 3),
        **{f"resident_{part}_mib": [sample[part] for sample in memory] for part in memory[0]},
    }


def resident(processes: Mapping[int, Process]) -> dict[str, float]:
    """MiB of memory that the ingresses and the replicas hold."""
    found = dict.fromkeys(_PARTS, 0.0)
    for pid, process in processes.items():
        part = next((part for part, title in _PARTS.items() if process.title.startswith(title)), None)
        if part is not None:
            found[part] += resident_bytes(pid) / 2**20
    return {part: round(mib, 1) for part, mib in found.items()}


def _ours(processes: Mapping[int, Process]) -> set[int]:
    return {pid for pid, process in processes.items() if process.title.startswith(_PARTS["replicas"])}


async def _window(target: Target, plan: Plan, tally: Tally, cases: Sequence[HostileRequest]) -> None:
    """A time of honest requests, evenly spread, with the attack beside them if there are cases."""
    began = time.perf_counter()
    honest = asyncio.create_task(_honest(target, plan))
    if cases:
        await _attack(target, plan, tally, cases)
        tally.attack_s += time.perf_counter() - began
    tally.honest[bool(cases)] += await honest


async def _honest(target: Target, plan: Plan) -> list[Answer]:
    body = {"prompt": [300, 301, 302], "max_tokens": HONEST_TOKENS, "ignore_eos": True, "stream": True}
    request = target.request("completions", json.dumps(body).encode())
    began, tasks = time.perf_counter(), []
    for number in range(int(plan.window_s * plan.honest_rate)):
        await asyncio.sleep(max(0.0, began + number / plan.honest_rate - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(target, request, timeout_s=HONEST_TIMEOUT_S)))
    return await asyncio.gather(*tasks)


async def _attack(target: Target, plan: Plan, tally: Tally, cases: Sequence[HostileRequest]) -> None:
    began, free = time.perf_counter(), asyncio.Semaphore(plan.connections)
    async with asyncio.TaskGroup() as tasks:
        for number, case in enumerate(cases):
            await asyncio.sleep(max(0.0, began + number / plan.rate - time.perf_counter()))
            await free.acquire()
            tally.by_kind[case.kind] += 1
            tasks.create_task(send_hostile(target, case, tally)).add_done_callback(lambda _: free.release())


async def send_hostile(target: Target, case: HostileRequest, tally: Tally) -> None:
    """Send one hostile request and count what came of it."""
    outcome, answer = "closed", b""
    try:
        async with asyncio.timeout(PATIENCE_OF_CUT_S if case.is_cut else PATIENCE_S):
            reader, writer = await asyncio.open_connection(target.host, target.port)
            try:
                writer.write(case.data)
                while data := await reader.read(65_536):
                    answer = answer or data.removeprefix(_CONTINUE)
            finally:
                writer.close()
    except TimeoutError:
        outcome = "hung_up"
    except OSError:
        pass  # the server did not want the rest
    if answer:
        outcome = answer[9:12].decode(errors="replace")
    tally.outcomes[outcome] += 1
    if outcome.startswith("5"):
        said = {"kind": case.kind, "request": repr(case.data[:300]), "answer": repr(answer[-300:])}
        tally.server_errors.append(said)


def _is_bad(figures: Mapping[str, Any]) -> bool:
    return bool(figures["server_errors"] or figures["restarts"] or figures["honest_failed"])


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.fuzz", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="its tokenizer and sizes are used")
    parser.add_argument("--cases", type=positive, default=100_000, metavar="N", help="hostile requests")
    parser.add_argument("--rate", type=float, default=400.0, metavar="N", help="hostile requests a second")
    parser.add_argument("--connections", type=positive, default=256, metavar="N", help="hostile ones at once, at most")
    parser.add_argument("--honest-rate", type=float, default=20.0, metavar="N", help="honest requests a second")
    parser.add_argument("--window-s", type=float, default=5.0, metavar="S", help="seconds with, and without, an attack")
    parser.add_argument("--replicas", type=positive, default=2, metavar="N")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS", help="what a step of a replica takes")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
