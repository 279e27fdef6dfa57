"""Measure the gain of a KV tier in a folder: `python -m benchmarks.engine.tiers --model DIR --folder DIR`.

Runs engines with and without `cache.tiers` in turn, in one process; the folder is emptied before each round.

    again      seconds to the first token of a prompt whose blocks were evicted, and in a new engine
    talks      conversations of several turns, all at once, over KV memory for a part of them: turns a second
    workload   a workload without common prefixes (`--workload`): tokens a second, 99th percentile between tokens

`engine_call_ms` is the longest call for the tier in the engine's thread. The answers of all engines are compared.
Progress goes to stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from app.build import build_sync_engine
from app.engine.engine import Engine
from app.engine.request import Request, SamplingParams
from app.kv_tiers.tier_store import TierStore
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.engine_setup import num_blocks_for
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell, where
from benchmarks.harness.figures import rounded
from benchmarks.harness.options import DTYPES
from benchmarks.harness.settings import engine_config
from benchmarks.harness.timeline import times_of
from benchmarks.harness.workload import read_workload

SETTLE_S = 60.0
REPLY_TOKENS, QUESTION_TOKENS = 32, 64  # in each turn


class Side:
    """An engine, and the time of the longest call that its thread has made for the tier."""

    def __init__(self, given: argparse.Namespace, *, num_blocks: int, has_tier: bool) -> None:
        config = engine_config(
            {
                "model.path": given.model,
                "model.num_threads": given.threads,
                **({"model.dtype": DTYPES[given.dtype]} if given.dtype else {}),
                "cache.num_blocks": num_blocks,
                "cache.tiers": [{"path": given.folder, "max_gib": given.max_gib}] if has_tier else [],
            }
        )
        self.engine: Engine = build_sync_engine(config)
        self.longest_ms = 0.0
        fetches = self.engine._scheduler.fetches
        self.store = fetches.store if isinstance(fetches.store, TierStore) else None
        if has_tier and self.store is None:
            raise BenchmarkError(f"--folder {given.folder}: this engine has no tier; the log says why")
        if self.store is not None:
            self.store.wait_until_listed(SETTLE_S)
            for owner, name in ((fetches, "begin"), (fetches, "collect"), (fetches._pool, "on_cached")):
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **more: Any) -> Any:
            began_at = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                self.longest_ms = max(self.longest_ms, (time.perf_counter() - began_at) * 1000)

        return timed

    def settle(self) -> None:
        if self.store is not None:
            self.store.settle(SETTLE_S)

    def first_token_s(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        return first_token_s(self.engine, prompt)


def first_token_s(engine: Engine, prompt: Sequence[int]) -> tuple[float, list[int]]:
    """Return the seconds to the first token of a request that runs alone, and the request's tokens."""
    began_at, first_s, token_ids = time.perf_counter(), 0.0, list[int]()
    engine.add(_request("alone", prompt, 8))
    for deltas in _steps(engine):
        for delta in deltas:
            first_s = first_s or time.perf_counter() - began_at
            token_ids += delta.token_ids
    return first_s, token_ids


def _steps(engine: Engine) -> Iterator[Any]:
    while engine.has_work:
        idle_s = engine.idle_s
        if idle_s:
            time.sleep(idle_s)
        yield engine.step()


@contextmanager
def opened(given: argparse.Namespace, *, num_blocks: int, has_tier: bool) -> Iterator[Side]:
    side = Side(given, num_blocks=num_blocks, has_tier=has_tier)
    try:
        yield side
    finally:
        side.engine.close()


def _request(request_id: str, prompt: Sequence[int], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds. Raises BenchmarkError if an answer differs."""
    parts: dict[str, Callable[[argparse.Namespace, random.Random], dict[str, Any]]] = {
        "again": again,
        "talks": talks,
        **({"workload": workload} if given.workload else {}),
    }
    figures: dict[str, Any] = where() | {"model": given.model}
    for name in given.only or parts:
        rounds = []
        for number in range(given.rounds):
            shutil.rmtree(given.folder, ignore_errors=True)
            rounds.append(parts[name](given, random.Random(given.seed + number)))
            shown = ", ".join(f"{each} {value:.4g}" for each, value in rounds[-1].items())
            tell(f"{name}, round {number + 1} of {given.rounds}: {shown}")
        figures[name] = {each: _over([found[each] for found in rounds]) for each in rounds[0]}
    shutil.rmtree(given.folder, ignore_errors=True)
    return figures


def _over(values: Sequence[float]) -> dict[str, Any]:
    return {"median": rounded(statistics.median(values)), "all": [rounded(value) for value in values]}


def again(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Compute a prompt, then another that takes all memory, then the first prompt with one more question."""
    size = 16
    first, other = (random_tokens(rng, given.prompt) for _ in range(2))
    second = [*first, *random_tokens(rng, QUESTION_TOKENS)]
    num_blocks = len(second) // size + 4
    with opened(given, num_blocks=num_blocks, has_tier=False) as side:
        side.first_token_s(random_tokens(rng, 64))  # the first step of an engine is slower
        side.first_token_s(first)
        side.first_token_s(other)
        computed_s, expected = side.first_token_s(second)
    with opened(given, num_blocks=num_blocks, has_tier=True) as side:
        side.first_token_s(random_tokens(rng, 64))
        side.first_token_s(first)
        side.settle()
        side.first_token_s(other)
        side.settle()
        fetched_s, token_ids = side.first_token_s(second)
        _check(token_ids, expected)
        longest_ms = side.longest_ms
    with opened(given, num_blocks=num_blocks, has_tier=True) as side:
        side.first_token_s(random_tokens(rng, 64))
        restarted_s, token_ids = side.first_token_s(second)
        _check(token_ids, expected)
    return {
        "computed_s": computed_s,
        "evicted_s": fetched_s,
        "restarted_s": restarted_s,
        "evicted_ratio": fetched_s / computed_s,
        "restarted_ratio": restarted_s / computed_s,
        "engine_call_ms": longest_ms,
    }


def talks(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Run conversations whose next turn comes when the previous turn is answered."""
    beginnings = [random_tokens(rng, given.beginning) for _ in range(given.talks)]
    questions = [[random_tokens(rng, QUESTION_TOKENS) for _ in range(given.turns)] for _ in range(given.talks)]
    longest = given.beginning + given.turns * (QUESTION_TOKENS + REPLY_TOKENS)
    num_blocks = max(given.talks * longest // 16 // given.share, longest // 16 + 1)
    found: dict[str, Any] = {}
    answers: dict[bool, Any] = {}
    for has_tier in (False, True):
        with opened(given, num_blocks=num_blocks, has_tier=has_tier) as side:
            side.first_token_s(random_tokens(rng, 64))
            began_at = time.perf_counter()
            answers[has_tier] = _converse(side, beginnings, questions)
            seconds = time.perf_counter() - began_at
            stats = side.engine.stats()
            name = "with" if has_tier else "without"
            found |= {
                f"turns_per_s_{name}": given.talks * given.turns / seconds,
                f"cached_{name}": stats.total_cached_tokens / stats.total_prompt_tokens,
            }
            if has_tier:
                found["engine_call_ms"] = side.longest_ms
    _check(answers[True], answers[False])
    return found | {"ratio": found["turns_per_s_with"] / found["turns_per_s_without"]}


def _converse(side: Side, beginnings: Sequence[list[int]], questions: Sequence[list[list[int]]]) -> list[list[int]]:
    """Return the tokens of each conversation at its end."""
    tokens = [list(each) for each in beginnings]
    left = [list(each) for each in questions]

    def ask(number: int) -> None:
        tokens[number] += left[number].pop(0)
        side.engine.add(_request(f"{number}-{len(left[number])}", tokens[number], REPLY_TOKENS))

    for number in range(len(tokens)):
        ask(number)
    for deltas in _steps(side.engine):
        for delta in deltas:
            number = int(delta.request_id.partition("-")[0])
            tokens[number] += delta.token_ids
            if delta.finish_reason is not None and left[number]:
                ask(number)
    return tokens


def workload(given: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Serve the workload once without and once with a tier, in random order."""
    read = read_workload(given.workload)
    num_blocks = num_blocks_for(read, block_size=16, max_running=32)
    found: dict[str, Any] = {}
    order = [False, True]
    rng.shuffle(order)
    answers = {}
    for has_tier in order:
        with opened(given, num_blocks=num_blocks, has_tier=has_tier) as side:
            side.first_token_s(random_tokens(rng, 64))  # other tokens: the tier must not have the workload's
            run = Carousel(side.engine).serve(read)
            answers[has_tier] = [timeline.token_ids for timeline in run.timelines.values()]
            times = times_of(run.answered)
            name = "with" if has_tier else "without"
            found[f"tokens_per_s_{name}"] = run.num_output_tokens / run.seconds
            found[f"itl_p99_s_{name}"] = times["itl_p99_s"]
    _check(answers[True], answers[False])
    return found | {
        "ratio": found["tokens_per_s_with"] / found["tokens_per_s_without"],
        "itl_p99_ratio": found["itl_p99_s_with"] / found["itl_p99_s_without"],
    }


def random_tokens(rng: random.Random, number: int, *, below: int = 700) -> list[int]:
    """Return random ids from 100 up."""
    return [rng.randrange(100, below) for _ in range(number)]


def _check(token_ids: Any, expected: Any) -> None:
    if token_ids != expected:
        raise BenchmarkError("an engine with a tier generated different tokens")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.tiers", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--folder", required=True, metavar="DIR", help="folder of the tier; it is deleted")
    parser.add_argument("--max-gib", type=float, default=8.0, metavar="N", help="size of the tier in GiB")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: the model's")
    parser.add_argument("--threads", type=positive, default=2, metavar="N")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N")
    parser.add_argument("--only", nargs="+", choices=("again", "talks", "workload"), help="default: all")
    parser.add_argument("--prompt", type=positive, default=2000, metavar="N", help="tokens of the prompt of `again`")
    parser.add_argument("--talks", type=positive, default=64, metavar="N")
    parser.add_argument("--turns", type=positive, default=4, metavar="N", help="turns of each conversation")
    parser.add_argument("--beginning", type=positive, default=400, metavar="N", help="tokens before the first turn")
    parser.add_argument("--share", type=positive, default=4, metavar="N", help="KV memory holds 1/N of the talks")
    parser.add_argument("--workload", metavar="FILE.jsonl", help="one request a line")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
