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

`--limits` starts no service: it simulates how near ingresses keep the limits of a key (`shares.py`), for 1, 3, 8 and
32 of them. Of each run: tokens admitted over those that one process with the whole limit admits.

The client is one process; its CPU time is told too, because it takes from what the service has of the machine.
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
_PATIENCE_S = 60.0  # beyond what a round takes at least
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
    if given.limits:
        return shares.measure_all(seed=given.seed)
    allow_many_files()
    with TemporaryDirectory() as folder, service(served(given, folder)) as running:
        gc.disable()  # the client's own pauses are not the service's
        try:
            asked = {name: getattr(given, name) for name in ("api", "streams", "tokens", "prompt_tokens", "step_ms")}
            return drive(running, given) | asked
        finally:
            gc.enable()


def served(given: argparse.Namespace, folder: str = "") -> dict[str, Any]:
    """The application's `args`: room for all streams on each replica, so that nothing is measured but the way there.

    `folder` is that of responses that are kept.
    """
    template_tokens = 64  # that a chat has beside what is asked, at most
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
    """One for each stream: prompts of random tokens, new ones for each round, so that no prefix is known."""

    return [target.request("completions", body) for body in _completions(given, source, tokens)]


def _completions(given: argparse.Namespace, source: random.Random, tokens: int, **more: Any) -> list[dict[str, Any]]:
    return [
        streamed(random_prompt(source, given.prompt_tokens), tokens, model=MODEL_NAME, ignore_eos=True, **more)
        for _ in range(given.streams)
    ]


def responses_of(given: argparse.Namespace, source: random.Random, tokens: int) -> list[Asked]:
    """The same as responses of OpenAI's API, kept or not, or as completions that are kept."""
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
    """All streams at once, to their ends. Raises BenchmarkError when one had not exactly the tokens it asked for."""
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
    parser.add_argument(
        "--api", choices=("completions", "responses", "kept", "kept-completions"), default="completions",
        help="which streams: completions, responses of OpenAI's newer API, or either of them kept",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--limits", action="store_true", help="how near limits of a key are kept, simulated")
    parser.add_argument("--seed", type=int, default=1, help="of --limits")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="its tokenizer is used")
    return parser


if __name__ == "__main__":
    sys.exit(main())
