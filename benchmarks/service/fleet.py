"""Measures the overhead of the fleet: the real service over real HTTP, with replicas that only sleep.

    python -m benchmarks.service.fleet --replicas 4 --streams 64 --tokens 128 --step-ms 20

Starts the service as `make serve` does, with simulated replicas. After a warm-up it runs `--streams` concurrent streams
`--rounds` times. Progress goes to stderr; the last line of stdout is one JSON object:

    tokens_per_s         output tokens over the seconds from the first request of a round to its last token
    cpu_us_per_token     user and system time of all processes of the service over those tokens: launcher, driver, Ray's
                         own, controller, HAProxy, ingress and replicas, with their idle work; without the client
    idle_cpu_per_s       CPU seconds of all processes for each second without requests, measured before the rounds
    added_ttft_*         time to the first token, from the moment the client begins with a request, less the one step
                         that any engine needs. Includes connecting and waiting for a running step (up to one step)
    added_itl_*          time between two arrivals of tokens, less one step
    dispatch_imbalance   requests on the fullest replica over the mean; null if answers do not name their replica

`--limits` starts no service: it simulates how closely 1, 3, 8 and 32 ingresses enforce the limits of a shared key
(`shares.py`). The figure of a run is the admitted tokens over the tokens that one process with the whole limit admits.

The client is one process. Its CPU time is reported because the client and the service share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chaos.kept import KeptTraffic
from benchmarks.chaos.traffic import Asked
from benchmarks.harness import machine
from benchmarks.harness.answer import Answer, ask, random_prompt, streamed
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.figures import percentiles
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import cpu_between
from benchmarks.harness.service import Service, application, service
from benchmarks.service import shares
from deployments.open_files import allow_many_files

MODEL_NAME = "simulated"
REPLICA_HEADER = "x-carousel-replica"
IDLE_S = 3.0
WARM_UP_TOKENS = 16
_PATIENCE_S = 60.0  # added to twice the least time of a round
_KV_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Round:
    """The answers of one round, one for each stream."""

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
    """Start the service, warm up, measure it idle, measure the rounds, and stop it."""
    if given.limits:
        return shares.measure_all(seed=given.seed)
    allow_many_files()
    with TemporaryDirectory() as folder, service(served(given, folder)) as running:
        gc.disable()  # pauses of the client would count as pauses of the service
        try:
            asked = {name: getattr(given, name) for name in ("api", "streams", "tokens", "prompt_tokens", "step_ms")}
            return drive(running, given) | asked
        finally:
            gc.enable()


def served(given: argparse.Namespace, folder: str = "") -> dict[str, Any]:
    """Return the application's `args`. Each replica has room for all streams: only the path to it is measured.

    `folder` holds the stored responses.
    """
    template_tokens = 64  # upper bound for the tokens that the chat template adds
    prompt_tokens = given.prompt_tokens + (0 if given.api.endswith("completions") else template_tokens)
    blocks_of_one = -(-(prompt_tokens + given.tokens + 1) // _KV_BLOCK)
    engine = {
        "model": {"path": given.model, "simulated": {"step_ms": given.step_ms}},
        "cache": {"num_blocks": given.streams * blocks_of_one, "block_size": _KV_BLOCK},
        "scheduler": {
            "max_running": given.streams,
            "max_waiting": given.streams,
            "max_step_tokens": given.streams * prompt_tokens,
            "prefill_chunk_tokens": prompt_tokens,
        },
    }
    ingress = {"num_replicas": given.ingresses}
    branches = {"batches": {"path": folder}} if given.api.startswith("kept") else {}
    return application(MODEL_NAME, engine, {"num_replicas": given.replicas}, ingress=ingress, **branches)


def drive(running: Service, given: argparse.Namespace, *, idle_s: float = IDLE_S) -> dict[str, Any]:
    """Warm up twice, wait idle for `idle_s`, run the rounds one after the other, and return their figures."""
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
    return figures_of(
        rounds,
        step_ms=given.step_ms,
        num_replicas=given.replicas,
        cpu_s=cpu_between(before, after),
        client_cpu_s=client_cpu_s,
        idle_cpu_per_s=idle_cpu_s,
        num_processes=len(after),
    )


def requests_of(target: Target, given: argparse.Namespace, source: random.Random, tokens: int) -> list[bytes]:
    """Return one request for each stream. Prompts are random tokens, new in each round: no prefix is ever cached."""

    return [target.request("completions", body) for body in _completions(given, source, tokens)]


def _completions(given: argparse.Namespace, source: random.Random, tokens: int, **more: Any) -> list[dict[str, Any]]:
    return [
        streamed(random_prompt(source, given.prompt_tokens), tokens, model=MODEL_NAME, ignore_eos=True, **more)
        for _ in range(given.streams)
    ]


def responses_of(given: argparse.Namespace, source: random.Random, tokens: int) -> list[Asked]:
    """Return one request for each stream of the Responses API, stored or not, or of stored completions."""
    if given.api == "kept-completions":
        bodies = _completions(given, source, tokens, store=True)
        return [Asked(f"{at}", given.api, body) for at, body in enumerate(bodies)]
    usual = {"model": MODEL_NAME, "stream": True, "ignore_eos": True, "max_output_tokens": tokens}
    asked = usual | ({"store": True, "background": True} if given.api == "kept" else {})
    letters = "abcdefghijklmnopqrstuvwxyz "
    return [
        Asked(f"{at}", given.api, asked | {"input": "".join(source.choices(letters, k=given.prompt_tokens))})
        for at in range(given.streams)
    ]


async def play(target: Target, source: random.Random, given: argparse.Namespace, *, tokens: int) -> Round:
    """Run all streams at once to their ends. Raises BenchmarkError if a stream has not exactly `tokens` tokens."""
    timeout_s = _PATIENCE_S + 2 * given.tokens * given.step_ms / 1000
    if given.api == "completions":
        prepared = requests_of(target, given, source, tokens)
        answers = await asyncio.gather(*(ask(target, request, timeout_s=timeout_s) for request in prepared))
    else:
        bodies = responses_of(given, source, tokens)
        answers = await KeptTraffic(target, bodies, {}, timeout_s).once()
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
    """Return the figures of the module docstring for these rounds."""
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
    """Return the requests on the fullest replica over the mean; None if an answer does not name its replica."""
    placed = Counter(answer.headers.get(REPLICA_HEADER) for answer in answers)
    return None if None in placed else round(max(placed.values()) * num_replicas / len(answers), 3)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.fleet", __doc__)
    parser.add_argument("--replicas", type=positive, default=4, metavar="N")
    parser.add_argument("--ingresses", type=positive, default=1, metavar="N", help="ingress processes")
    parser.add_argument("--streams", type=positive, default=64, metavar="N", help="concurrent streams")
    parser.add_argument("--tokens", type=positive, default=128, metavar="N", help="output tokens of each stream")
    parser.add_argument("--prompt-tokens", type=positive, default=32, metavar="N", help="prompt tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="MS", help="duration of a simulated step")
    parser.add_argument(
        "--api", choices=("completions", "responses", "kept", "kept-completions"), default="completions",
        help="API of the streams: completions, responses, stored responses (kept) or stored completions",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--limits", action="store_true", help="simulate how closely limits of a key are enforced")
    parser.add_argument("--seed", type=int, default=1, help="random seed of --limits")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="model folder with the tokenizer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
