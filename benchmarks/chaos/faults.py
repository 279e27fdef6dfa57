"""Rows R1 to R12: kills and stops processes, or loses network packets, while streams run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chaos.head import Batch, why_no_head, with_head
from benchmarks.chaos.kept import KeptTraffic, kept
from benchmarks.chaos.networks import Host, own_network, why_no_networks
from benchmarks.chaos.node_loss import LAYOUT, ON_EACH, node
from benchmarks.chaos.stage import LENGTHS, Size, Stage, application, stage, under_traffic
from benchmarks.chaos.traffic import MODEL_NAME, Asked, Traffic, alike, mixed, moment, with_reference
from benchmarks.chaos.verdict import by_kind, judged, judged_row, spread
from benchmarks.harness.answer import Answer
from benchmarks.harness.command import tell
from benchmarks.harness.random_adapter import projections_in, save_random_adapter

LASTS_S = 8.0  # duration of a fault that ends: a stopped replica, a network that loses packets
_HANGS_S = 30.0  # duration of a stop of Ray's head
_QUIET_S = (1.0, 2.0)  # range of the pause between the recovery and the next fault
_QUIET_AFTER_KILL_S = (0.5, 2.5)
_AFTER_S = 8.0  # duration of the traffic after a killed process of Serve is replaced
_MAX_RESTARTS = 3  # maximum restarts by the launcher within ten minutes
_CRASH_TOKEN = 0  # a special token that no replica samples and no other prompt contains
_NUM_ALIKE = 12  # output tokens of every request of R3
_WITH_WEIGHTS = (100, 400)  # range of output tokens with real weights
_STEP_TIMEOUT_S = 4.0  # `step_timeout_s` of replicas with several ranks
_NUM_ADAPTERS = 4
_RANKING = "ranked"
_PIPELINES: list[dict[str, Any]] = [
    {"name": "alone", "steps": [{"kind": "generate", "model": MODEL_NAME}]},
    {
        "name": "careful",
        "steps": [{"kind": "cascade", "small": MODEL_NAME, "large": "alone", "min_mean_logprob": -0.001}],
    },
    {"name": "together", "steps": [{"kind": "ensemble", "models": [MODEL_NAME, "alone"]}]},
    {
        "name": _RANKING,
        "steps": [{"kind": "embed", "model": MODEL_NAME, "top_n": 2}, {"kind": "generate", "model": "careful"}],
    },
]

Row = dict[str, Any]
Mend = Callable[[], None]
Strike = Callable[[], Mend | None]  # makes a fault; returns the function that ends a lasting fault, else None
Choose = Callable[[Stage, random.Random], Strike]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that is made repeatedly under traffic. Each repetition starts after the service has recovered."""

    row: str
    text: str
    choose: Choose  # chooses the process or host to hit; runs in a thread, because it may block
    quiet_s: tuple[float, float] = _QUIET_S
    source: str = ""  # the name of the random source; default: row and text
    recovery: str = "recovery_s"  # name of the figure: seconds from the fault, or its end, until all replicas answer
    replaced: Callable[[Stage], list[int]] | None = None  # recovery requires a new process among these
    lasts_s: float = LASTS_S  # duration of a lasting fault
    after_s: float = 0.0  # seconds of traffic after the recovery

    def _replacement(self, running: Stage) -> Callable[[], bool]:
        """Return a function that checks whether `replaced` has a process that it does not have now."""
        if self.replaced is None:
            return lambda: True
        replaced, before = self.replaced, set(self.replaced(running))
        return lambda: bool(set(replaced(running)) - before)

    async def figures(self, running: Stage, traffic: Traffic, size: Size) -> Row:
        """Make the fault `size.runs` times and return the row. `traffic` must have no answers yet."""
        source = size.source(self.source or f"{self.row} {self.text}")
        struck_s, recoveries_s = [], []
        async with traffic.flowing():
            for run in range(size.runs):
                await asyncio.sleep(source.uniform(*self.quiet_s))
                strike = await asyncio.to_thread(self.choose, running, source)
                is_replaced = self._replacement(running)
                struck_s.append(time.perf_counter())
                ended_s = await _lasting(strike, self.lasts_s)
                await moment(is_replaced, look_s=0.05)
                recoveries_s.append(await running.is_whole() - (ended_s or struck_s[-1]))
                tell(f"{self.row}: {self.text}: run {run + 1} of {size.runs}: whole after {recoveries_s[-1]:.1f} s")
                await asyncio.sleep(self.after_s)
        found = {"row": self.row, "fault": self.text, "runs": size.runs}
        return await judged_row(found, running, traffic, struck_s, spread(self.recovery, recoveries_s))


async def _lasting(strike: Strike, seconds: float) -> float | None:
    """Make a fault. A lasting fault ends after `seconds`; return the time of its end, else None."""
    mend = strike()
    if mend is None:
        return None
    try:
        await asyncio.sleep(seconds)
    finally:
        mend()
    return time.perf_counter()


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> Mend:
    os.kill(pid, signal.SIGSTOP)
    return partial(os.kill, pid, signal.SIGCONT)


def kill_replicas(number: int) -> Choose:
    """Return a choice that kills `number` random replicas at once."""
    return lambda running, source: partial(kill, source.sample(running.replicas(), number))


def _rank(number: signal.Signals) -> Choose:
    """Return a choice that sends a signal (SIGKILL or SIGSTOP) to one random rank."""
    return lambda running, source: partial(os.kill, source.choice(running.ranks()), number)


async def _all(faults: Sequence[Fault], size: Size, *, kinds: str = "", **settings: Any) -> list[Row]:
    """Make the faults one after the other in one service. kinds: the name of additional counts by kind of request."""
    rows = []
    async with under_traffic(size, **settings) as (running, traffic):
        for fault in faults:
            fresh = replace(traffic, answers=[])
            found = await fault.figures(running, fresh, size)
            rows.append(found | ({kinds: by_kind(fresh.answers, fresh.reference)} if kinds else {}))
    return rows


def _killing_one(row: str, text: str = "") -> Fault:
    return Fault(row=row, text=f"kill -9 one of 3 replicas{text}", choose=kill_replicas(1), quiet_s=_QUIET_AFTER_KILL_S)


async def kill_one_of_three(size: Size) -> list[Row]:
    """R1: kill -9 one of 3 replicas at random moments, each time after all three replicas have recovered."""
    return await _all([_killing_one("R1")], size)


async def kill_with_weights(size: Size) -> list[Row]:
    """R2: R1 with the bundled model's weights. Penalties change tokens here, while simulated replicas ignore them."""
    fault = _killing_one("R2", " with real weights")
    return await _all([fault], size, kinds="by_kind", lengths=_WITH_WEIGHTS, weights=True)


async def kill_with_adapters(size: Size) -> list[Row]:
    """R11: R2 with requests for several adapters and for the base model."""
    fault = _killing_one("R11", f" with real weights and {_NUM_ADAPTERS} adapters")
    with TemporaryDirectory() as folder:
        paths = {f"adapter-{seed}": Path(folder) / str(seed) for seed in range(_NUM_ADAPTERS)}
        for seed, path in enumerate(paths.values()):
            save_random_adapter(path, projections_in(Path("models/demo")), rank=8, seed=seed, scale=0.2)
        requests = [
            replace(asked, body={**asked.body, "model": name})
            for asked, name in zip(mixed(size.streams, max_tokens=_WITH_WEIGHTS), cycle((*paths, MODEL_NAME)))
        ]
        adapters = {name: str(path) for name, path in paths.items()}
        return await _all([fault], size, requests=requests, weights=True, adapters=adapters)


async def kill_with_pipelines(size: Size) -> list[Row]:
    """R12: R2 with requests for pipelines and for the model. An answer is complete only if all its steps completed."""
    names = (MODEL_NAME, *(each["name"] for each in _PIPELINES))
    requests = [
        _for_pipeline(asked, name)
        for asked, name in zip(mixed(size.streams, max_tokens=(60, 200)), cycle(names), strict=False)
    ]
    fault = _killing_one("R12", " with real weights and pipelines")
    return await _all([fault], size, kinds="by_pipeline", requests=requests, weights=True, pipelines=_PIPELINES)


def _for_pipeline(asked: Asked, name: str) -> Asked:
    """Return the request for a pipeline. A request for the ranking pipeline has documents and a prompt as text."""
    body: Row = {**asked.body, "model": name}
    if name == _RANKING:
        numbers = [str(number) for number in body["prompt"]]
        body |= {"prompt": " ".join(numbers), "documents": [" ".join(numbers[at : at + 5]) for at in range(5)]}
    return replace(asked, name=f"{name} {asked.name}", body=body)


async def stop_one_of_three(size: Size) -> list[Row]:
    """R4: SIGSTOP one of 3 replicas, and SIGCONT after eight seconds, with two values of step_timeout_s."""
    rows = []
    for step_s in (60.0, 20.0):
        fault = Fault(
            row="R4", text=f"SIGSTOP one of 3 replicas for {LASTS_S:g} s, step_timeout_s {step_s:g}", source="R4",
            choose=lambda running, source: partial(stop, source.choice(running.replicas())),
            recovery="answers_after_sigcont_s",
        )  # fmt: skip
        rows += await _all([fault], size, step_timeout_s=step_s)
    return rows


async def kill_several(size: Size) -> list[Row]:
    """R5: kill -9 two of three replicas at once, then all three with a long and with a short place_timeout_s."""
    two, all_with_time, all_without = (
        Fault(row="R5", text=f"kill -9 {text}", choose=kill_replicas(number), quiet_s=_QUIET_AFTER_KILL_S)
        for number, text in (
            (2, "two of 3 replicas"),
            (3, "all 3 replicas, place_timeout_s 30"),
            (3, "all 3 replicas, place_timeout_s 1"),
        )
    )
    return await _all([two, all_with_time], size) + await _all([all_without], size, place_timeout_s=1.0)


def _infrastructure(row: str, text: str, processes: Callable[[Stage], list[int]]) -> Fault:
    return Fault(
        row=row, text=text, choose=lambda running, _: partial(kill, processes(running)), quiet_s=(1.0, 1.0),
        replaced=processes, after_s=_AFTER_S,
    )  # fmt: skip


async def kill_ingress(size: Size) -> list[Row]:
    """R6: kill -9 the only ingress. Its clients lose their connections, and later clients wait for the new ingress.

    Afterwards, clients ask for stored responses, chats and completions and resume broken streams, while the ingress is
    killed, and then the batches process.
    """
    rows = await _all([_infrastructure("R6", "kill -9 the only ingress", Stage.ingresses)], size)
    with TemporaryDirectory() as folder:
        requests = kept(mixed(size.streams, max_tokens=LENGTHS))
        with stage(application(batches={"path": folder})) as running:
            traffic = await with_reference(running.target, requests, KeptTraffic)
            assert isinstance(traffic, KeptTraffic), "the class that was passed"
            for text, processes in (
                ("the only ingress; clients of kept responses, chats and completions go on", Stage.ingresses),
                ("the process of batches; the same", Stage.batches),
            ):
                fresh = replace(traffic, answers=[], num_breaks=0)
                row = await _infrastructure("R6", f"kill -9 {text}", processes).figures(running, fresh, size)
                by_endpoint = by_kind(fresh.answers, fresh.reference)
                rows.append(row | {"connections_broken": fresh.num_breaks, "by_endpoint": by_endpoint})
    return rows


async def kill_proxy(size: Size) -> list[Row]:
    """R17: kill -9 HAProxy, and then the actor that starts it. No client can connect until Serve has replaced both."""
    faults = (("HAProxy", "haproxy"), ("the actor of HAProxy", "ray::HAProxyManager"))
    return await _all(
        [_infrastructure("R17", f"kill -9 {text}", partial(Stage.named, title=title)) for text, title in faults], size
    )


async def kill_controller(size: Size) -> list[Row]:
    """R7: kill -9 Serve's controller, which requests need only when replicas start or end; SIGSTOP Ray's head (GCS);
    kill -9 the head, after which the launcher starts a new cluster; kill -9 a head that stores its state in Redis.
    """
    controller = _infrastructure("R7", "kill -9 Serve's controller", Stage.controllers)
    hang = replace(
        _with_a_replica(f"SIGSTOP Ray's GCS for {_HANGS_S:g} s", lambda running: stop(*_heads(running))),
        lasts_s=_HANGS_S, recovery="whole_after_sigcont_s", after_s=_AFTER_S,
    )  # fmt: skip
    head = replace(_infrastructure("R7", "kill -9 Ray's GCS, without Redis", _heads), replaced=Stage.replicas)
    rows = await _all([controller, hang], size)
    rows += await _all([head], replace(size, runs=min(size.runs, _MAX_RESTARTS)))
    return rows + await _lose_head(size)


def _heads(running: Stage) -> list[int]:
    return running.named("gcs_server")


async def _lose_head(size: Size) -> list[Row]:
    """Kill a head whose state is in Redis, together with a replica. The next head must replace the replica."""
    reason = why_no_head()
    if reason is not None:
        return [{"row": "R7", "fault": "kill -9 Ray's head, with Redis", "skipped": reason}]
    # The threads of the previous rows are not in this service's network namespace.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    with TemporaryDirectory() as folder, with_head(application(batches={"path": folder})) as (
        running, head,
    ):  # fmt: skip
        await running.is_whole()
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        batch = Batch.begin(running.target, num_rows=100 * size.runs)
        faults = (
            _with_a_replica("kill -9 the GCS of a head with Redis", lambda running: kill(_heads(running))),
            _with_a_replica(f"kill -9 a whole head with Redis, for {LASTS_S:g} s", lambda _: head.lost()),
        )
        rows = [await fault.figures(running, replace(traffic, answers=[]), size) for fault in faults]
        for row in rows:
            del row["left_over"]  # the rows of the batch are still running
        meanwhile = {"row": "R7", "fault": "a batch meanwhile"} | await batch.counts()
        return [*rows, meanwhile | {"left_over": await running.left_over()}]


def _with_a_replica(text: str, strike_head: Callable[[Stage], Mend | None]) -> Fault:
    """Return a fault of Ray's head together with a killed replica. Only a working head can replace the replica."""

    def choose(running: Stage, source: random.Random) -> Strike:
        victim = source.choice(running.replicas())

        def strike() -> Mend | None:
            mend = strike_head(running)
            kill([victim])
            return mend

        return strike

    return Fault(row="R7", text=f"{text}, and kill -9 one of 3 replicas", choose=choose, replaced=Stage.replicas)


async def part_from_replicas(size: Size) -> list[Row]:
    """R8: lose the packets between two hosts with two replicas each for eight seconds. Needs root."""
    reason = why_no_networks()
    if reason is not None:
        return [{"row": "R8", "fault": "a partition between ingress and replicas", "skipped": reason}]
    with ExitStack() as block:
        [host] = block.enter_context(own_network())
        running = block.enter_context(stage(application(num_replicas=2 * ON_EACH), layout=LAYOUT))
        block.enter_context(node(running, on=host))
        await running.is_whole()
        traffic = await with_reference(running.target, mixed(size.streams, max_tokens=LENGTHS))
        ways: dict[str, Mend] = {
            "both ways": host.lose_both_ways,
            "replica to ingress": host.lose_what_it_sends,
            "ingress to replica": host.lose_what_is_sent_to_it,
        }
        return [
            await _parting(host, way, cut).figures(running, replace(traffic, answers=[]), size)
            for way, cut in ways.items()
        ]


def _parting(host: Host, way: str, cut: Mend) -> Fault:
    def strike() -> Mend:
        cut()
        return host.mend

    return Fault(
        row="R8", text=f"packets lost for {LASTS_S:g} s between ingress and 2 of 4 replicas, {way}", source=f"R8 {way}",
        choose=lambda *_: strike, recovery="answers_after_mending_s",
        # TCP's pause before a retransmission grows with the loss. If packets were lost again before the retransmission,
        # Ray would see one long loss, and Ray gives up the other node after some 25 s.
        after_s=2 * LASTS_S,
    )  # fmt: skip


async def kill_at_each_phase(size: Size) -> list[Row]:
    """R3: kill -9 one of three replicas at a given phase of streams that start at once and have equal lengths."""
    phases: dict[str, Callable[[Sequence[Answer]], bool]] = {
        "prefill": lambda answers: time.perf_counter() - answers[0].begun_s > 0.25,
        "first token": lambda answers: any(each.events_s for each in answers),
        "last token": lambda answers: any(len(each.events_s) >= _NUM_ALIKE - 1 for each in answers),
        "before [DONE]": lambda answers: any(each.finish_reasons for each in answers),
    }
    requests = alike(size.streams, num_tokens=_NUM_ALIKE, num_prompt_tokens=200)
    async with under_traffic(
        size, requests=requests, step_ms=60, per_token_ms=0.25, end_probability=0
    ) as (running, traffic):  # fmt: skip
        return [await _killing_at(running, traffic, size, name, is_now) for name, is_now in phases.items()]


async def _killing_at(
    running: Stage, traffic: Traffic, size: Size, phase: str, is_now: Callable[[Sequence[Answer]], bool]
) -> Row:
    source = size.source(phase)
    fresh = replace(traffic, answers=[])
    struck_s = []
    for run in range(size.runs):
        first = len(fresh.answers)
        answering = asyncio.ensure_future(fresh.once())
        await moment(partial(_is_now, fresh.answers, first, is_now))
        victim = source.choice(running.replicas())
        struck_s.append(time.perf_counter())
        kill([victim])
        await answering
        await running.is_whole()
        tell(f"R3: {phase}: run {run + 1} of {size.runs}")
    found = {"row": "R3", "fault": f"kill -9 one of 3 replicas: {phase}", "runs": size.runs}
    return await judged_row(found, running, fresh, struck_s)


def _is_now(answers: Sequence[Answer], first: int, is_now: Callable[[Sequence[Answer]], bool]) -> bool:
    """Return whether there are answers from index `first` on and the condition holds for them."""
    return len(answers) > first and is_now(answers[first:])


async def crash_on_request(size: Size) -> list[Row]:
    """R9: send a request that kills every replica that computes it, among normal requests."""
    async with under_traffic(size, crash_token_id=_CRASH_TOKEN) as (running, traffic):
        body = alike(1, num_tokens=20)[0].body
        deadly = Asked("deadly", "seeded", {**body, "prompt": [*body["prompt"], _CRASH_TOKEN]})
        culprits = replace(traffic, answers=[])
        async with traffic.flowing():
            for run in range(size.runs):
                await asyncio.sleep(1.0)
                ended = await culprits.ask(deadly)
                tell(f"R9: run {run + 1} of {size.runs}: the deadly request: {ended.outcome}")
                await running.is_whole()
        seconds = [each.ended_s - each.begun_s for each in culprits.answers]
        return [
            {"row": "R9", "fault": "a request that kills each replica that computes it", "runs": size.runs}
            | {"culprits": [each.outcome for each in culprits.answers]}
            | spread("culprit_ended_after_s", seconds, 2)
            | judged(traffic.answers, traffic.reference)
            | {"left_over": await running.left_over()}
        ]


async def lose_rank(size: Size) -> list[Row]:
    """R10: kill -9 one rank, then SIGSTOP one rank for good. Replicas have two ranks and use the bundled weights."""
    faults = [
        Fault(
            row="R10", text=f"{how} a rank of one of 2 replicas, step_timeout_s {_STEP_TIMEOUT_S:g}",
            choose=_rank(number), quiet_s=_QUIET_AFTER_KILL_S, replaced=Stage.replicas,
        )
        for how, number in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP))
    ]  # fmt: skip
    return await _all(
        faults, size, lengths=_WITH_WEIGHTS, weights=True, num_replicas=2, tensor_parallel=2,
        step_timeout_s=_STEP_TIMEOUT_S,
    )  # fmt: skip
