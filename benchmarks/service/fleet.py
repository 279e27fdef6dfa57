"""What the fleet itself costs: the real service over real HTTP, with replicas that only sleep.

    python -m benchmarks.service.fleet --replicas 4 --streams 64 --tokens 128 --step-ms 20

Starts the service as `make serve` does, with simulated replicas, and drives it with so many streams at once, `--rounds`
times after a warm-up. Progress goes to stderr; the last line of stdout is one JSON object:

    tokens_per_s         output tokens over the seconds from the first request of a round to its last token
    cpu_us_per_token     user and system time of all processes of the service over those tokens: launcher, driver, Ray's
                         own, controller, HAProxy, ingress and replicas, their idle work included; not the client's
    idle_cpu_per_s       the same for each second of doing nothing, measured before
    added_ttft_*         time to the first token, counted from when the client turns to a request, less one step, which
                         any engine needs. Connecting and waiting for a step that runs already (up to a step) are in it
    added_itl_*          time between two arrivals of tokens less one step
    dispatch_imbalance   requests on the fullest replica over the mean; null when answers do not name their replica

The client is one process; its CPU time is told too, because it takes from what the service has of the machine.

    python -m benchmarks.service.fleet --idle 5000 --others 1000 --over --step-ms 250 --streams 16 --rounds 1

plays a round again beside clients in a process of their own (`crowd.py`), and says under `beside`:

    files                    that each of client, HAProxy and ingress may open
    idle, others             what came of connections that do nothing after one small answer, and of streams, by status
    kib_of_a_connection, kib_of_a_stream   what processes hold more, over their number, without the kernel's buffers
    times                    of the round alone, beside the idle connections, and beside all; itl: between two tokens
    full                     with `--over`: the connections that the service took (`connections`; it took no more where
                             `newcomer` is not `completed`), what a client saw that came then, within five seconds,
                             streams under way that came to their end, and after how long a new one was answered when
                             the idle ones were gone
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import machine
from benchmarks.harness.answer import Answer, ask, random_prompt, streamed
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.figures import percentiles
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import cpu_between, resident_mib
from benchmarks.harness.service import Service, application, service
from benchmarks.harness.timeline import times_of
from benchmarks.service.crowd import Crowd, crowd
from deployments.open_files import allow_many_files

MODEL_NAME = "simulated"
REPLICA_HEADER = "x-carousel-replica"
IDLE_S = 3.0
WARM_UP_TOKENS = 16
_PATIENCE_S = 60.0  # beyond what a round takes at least
_OTHER_TOKENS = 2000  # of a prompt and its stream in the crowd: little less than the model's context
_NEWCOMER_S = 5.0
_INGRESS, _PROXY = "ray::ServeReplica:carousel:ingress", "haproxy"
_KV_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Round:
    """One answer for each stream."""

    answers: list[Answer]

    @property
    def seconds(self) -> float:
        return max(answer.ended_s for answer in self.answers) - min(answer.begun_s for answer in self.answers)

    @property
    def num_tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start, warm up, look at it idle, measure, stop."""
    allow_many_files()
    with service(served(given)) as running:
        gc.disable()  # the client's own pauses are not the service's
        try:
            asked = {name: getattr(given, name) for name in ("streams", "tokens", "prompt_tokens", "step_ms")}
            return drive(running, given) | asked
        finally:
            gc.enable()


def served(given: argparse.Namespace) -> dict[str, Any]:
    """The application's `args`: room for all streams on each replica, so that nothing is measured but the way there."""
    blocks_of_one = -(-(given.prompt_tokens + given.tokens + 1) // _KV_BLOCK)
    num_blocks = given.streams * blocks_of_one + given.others * (-(-_OTHER_TOKENS // _KV_BLOCK) + 1)
    num_streams = given.streams + given.others
    engine = {
        "model": {"path": given.model, "simulated": {"step_ms": given.step_ms}},
        "cache": {"num_blocks": num_blocks, "block_size": _KV_BLOCK},
        "scheduler": {
            "max_running": num_streams,
            "max_waiting": num_streams,
            "max_step_tokens": num_streams * given.prompt_tokens,
            "prefill_chunk_tokens": given.prompt_tokens,
        },
    }
    ingress = {"num_replicas": given.ingresses}
    return application(MODEL_NAME, engine, {"num_replicas": given.replicas}, ingress=ingress)


def drive(running: Service, given: argparse.Namespace, *, idle_s: float = IDLE_S) -> dict[str, Any]:
    """Warm up twice, wait idle, then the rounds one after the other."""
    source = random.Random("fleet")
    for _ in range(2):
        asyncio.run(play(running.target, source, given, tokens=min(given.tokens, WARM_UP_TOKENS)))
    before = running.processes()
    began = time.perf_counter()
    time.sleep(idle_s)
    idle_cpu_s = sum(cpu_between(before, running.processes()).values()) / (time.perf_counter() - began)
    before, client_before = running.processes(), machine.own_cpu_s()
    rounds = []
    for number in range(1, given.rounds + 1):
        rounds.append(asyncio.run(play(running.target, source, given, tokens=given.tokens)))
        done = rounds[-1]
        tell(f"round {number} of {given.rounds}: {done.num_tokens:,} tokens in {done.seconds:.2f} s")
    client_cpu_s, after = machine.own_cpu_s() - client_before, running.processes()
    figures = figures_of(
        rounds,
        step_ms=given.step_ms,
        num_replicas=given.replicas,
        cpu_s=cpu_between(before, after),
        client_cpu_s=client_cpu_s,
        idle_cpu_per_s=idle_cpu_s,
        num_processes=len(after),
    )
    is_alone = not (given.idle or given.others or given.over)
    return figures if is_alone else figures | {"beside": beside(running, given, source, alone=rounds[-1])}


def beside(running: Service, given: argparse.Namespace, source: random.Random, *, alone: Round) -> dict[str, Any]:
    """The figures beside a crowd, in the order of the page's docstring."""
    prompt = random_prompt(source, given.prompt_tokens)
    body = streamed(prompt, _OTHER_TOKENS - given.prompt_tokens, model=MODEL_NAME, ignore_eos=True)
    found: dict[str, Any] = {"files": files_allowed(running)}
    times = {"alone": times_of(alone.answers, (50, 99))}
    with crowd(running.target, running.target.request("completions", body)) as others:
        empty = memory_kib(running)
        found["idle"] = others.connect(given.idle)
        with_idle = memory_kib(running)
        found["kib_of_a_connection"] = of_one(empty, with_idle, given.idle)
        tell(f"idle connections: {dict(found['idle'])}")
        times["beside_idle"] = _times_of_round(running, given, source)
        found["others"] = others.stream(given.others)
        tell(f"other streams: {dict(found['others'])}; the idle ones: {dict(others.ask_again())}")
        times["beside_all"] = _times_of_round(running, given, source)
        found["kib_of_a_stream"] = of_one(with_idle, memory_kib(running), given.others)
        found["times"] = times
        if given.over:
            found["full"] = asyncio.run(filled(running, others, given, source))
    return found


def _times_of_round(running: Service, given: argparse.Namespace, source: random.Random) -> dict[str, float | None]:
    return times_of(asyncio.run(play(running.target, source, given, tokens=given.tokens)).answers, (50, 99))


async def filled(
    running: Service, others: Crowd, given: argparse.Namespace, source: random.Random
) -> dict[str, Any]:  # fmt: skip
    """As many connections as the service takes while a round is under way, and what a client sees that comes then."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    under_way = asyncio.create_task(play(running.target, source, given, tokens=given.tokens))
    still_idle = await asyncio.to_thread(others.ask_again)
    more = await asyncio.to_thread(others.connect, most - still_idle["200"] - given.others - 100)
    tell(f"until it is full: {dict(more)}, beside {dict(still_idle)}")
    [newcomer] = requests_of(running.target, given, source, 1)[:1]
    refused = await ask(running.target, newcomer, timeout_s=_NEWCOMER_S)
    lasted = not under_way.done()
    done = await under_way
    await asyncio.to_thread(others.hang_up)
    began_s = time.perf_counter()
    answered = await ask(running.target, newcomer, timeout_s=_PATIENCE_S)
    return {
        "connections": still_idle["200"] + more["200"] + given.others + given.streams * lasted,
        "of_more": dict(more),
        "newcomer": refused.outcome,
        "under_way_completed": len(done.answers),
        "under_way_lasted": lasted,  # until the newcomer was there
        "answered_after": answered.outcome,
        "answered_after_s": round(time.perf_counter() - began_s, 3),
    }


def files_allowed(running: Service) -> dict[str, int]:
    """The soft limits of the client, of HAProxy and of the ingresses."""
    found = {"client": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    for pid, process in running.processes().items():
        if process.title in (_INGRESS, _PROXY):
            found[process.title] = resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    return found


def memory_kib(running: Service) -> dict[str, float]:
    """What processes hold, by what they call themselves."""
    found = Counter[str]()
    for pid, process in running.processes().items():
        found[process.title] += round(1024 * resident_mib(pid))
    return dict(found)


def of_one(before: Mapping[str, float], after: Mapping[str, float], number: int) -> dict[str, float]:
    """KiB more of the processes that have some, over a number; nothing for no number."""
    more = {title: (kib - before.get(title, 0.0)) / number for title, kib in after.items() if number}
    return {title: round(kib, 2) for title, kib in sorted(more.items()) if kib >= 0.05 or title in (_INGRESS, _PROXY)}


def requests_of(target: Target, given: argparse.Namespace, source: random.Random, tokens: int) -> list[bytes]:
    """One for each stream: prompts of random tokens, new ones for each round, so that no prefix is known."""

    bodies = (
        streamed(random_prompt(source, given.prompt_tokens), tokens, model=MODEL_NAME, ignore_eos=True)
        for _ in range(given.streams)
    )
    return [target.request("completions", body) for body in bodies]


async def play(target: Target, source: random.Random, given: argparse.Namespace, *, tokens: int) -> Round:
    """All streams at once, to their ends. Raises BenchmarkError when one had not exactly the tokens it asked for."""
    prepared = requests_of(target, given, source, tokens)
    timeout_s = _PATIENCE_S + 2 * given.tokens * given.step_ms / 1000
    answers = await asyncio.gather(*(ask(target, request, timeout_s=timeout_s) for request in prepared))
    for answer in answers:
        if not answer.has_succeeded or answer.num_tokens != tokens:
            raise BenchmarkError(f"a stream of {tokens} tokens brought {answer.num_tokens}: {answer.in_words}")
    return Round(list(answers))


def figures_of(
    rounds: Sequence[Round],
    *,
    step_ms: float,
    num_replicas: int,
    cpu_s: dict[str, float],
    client_cpu_s: float,
    idle_cpu_per_s: float,
    num_processes: int,
) -> dict[str, Any]:
    """Sum up the rounds."""
    answers = [answer for done in rounds for answer in done.answers]
    num_tokens = sum(done.num_tokens for done in rounds)
    first_ms = [answer.time_to_first_token_s * 1000 - step_ms for answer in answers]
    gaps_ms = [gap * 1000 - step_ms for answer in answers for gap in answer.gaps_s]
    return {
        "tokens_per_s": round(num_tokens / sum(done.seconds for done in rounds), 1),
        "all_tokens_per_s": [round(done.num_tokens / done.seconds, 1) for done in rounds],
        "cpu_us_per_token": round(sum(cpu_s.values()) / num_tokens * 1e6, 1),
        "cpu_us_per_token_by_process": {
            title: round(seconds / num_tokens * 1e6, 1)
            for title, seconds in sorted(cpu_s.items(), key=lambda entry: -entry[1])
            if seconds > 0
        },
        "client_cpu_us_per_token": round(client_cpu_s / num_tokens * 1e6, 1),
        "idle_cpu_per_s": round(idle_cpu_per_s, 3),
        **percentiles("added_ttft", first_ms, (50, 99), unit="ms", digits=3),
        **percentiles("added_itl", gaps_ms or [0.0], (50, 99), unit="ms", digits=3),
        "dispatch_imbalance": imbalance(answers, num_replicas),
        "num_processes": num_processes,
    }


def imbalance(answers: Sequence[Answer], num_replicas: int) -> float | None:
    """Requests on the fullest replica over the mean of all; None when some answer does not name its replica."""
    placed = Counter(answer.headers.get(REPLICA_HEADER) for answer in answers)
    return None if None in placed else round(max(placed.values()) * num_replicas / len(answers), 3)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.fleet", __doc__)
    parser.add_argument("--replicas", type=positive, default=4, metavar="N")
    parser.add_argument("--ingresses", type=positive, default=1, metavar="N", help="processes of the HTTP side")
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="at once")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="of each stream")
    parser.add_argument("--prompt-tokens", type=positive, default=32, metavar="N", help="of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS", help="of a simulated step")
    parser.add_argument("--idle", type=int, default=0, metavar="N", help="connections beside that do nothing")
    parser.add_argument("--others", type=int, default=0, metavar="N", help="streams beside that are not measured")
    parser.add_argument("--over", action="store_true", help="then as many connections as the service takes")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="its tokenizer is used")
    return parser


if __name__ == "__main__":
    sys.exit(main())
