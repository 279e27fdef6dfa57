"""What several ranks cost a step, and what they give.

    python -m benchmarks.engine.tensor_parallel [--model DIR] [--dtype bf16] [--sequences 1 8 32]

First steps of nothing: rank 0 sends the step, and the ranks exchange one number through a socket. With --model the
native decoder, in two ranks of one thread each against one process of two threads; both engines take turns. Medians.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from app.assembly import Devices, build_sync_engine
from app.child_process import child_command, child_environment
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.engine import Engine
from app.engine.request import Request, SamplingParams
from app.model.parallel.channel import Channel, Kind, settings_of
from app.model.parallel.follower import die_with, follow
from app.model.parallel.group import RankGroup
from app.model.parallel.ranks import Ranks
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.options import DTYPES

NUM_RANKS = 2
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 64
STEP_TIMEOUT_S = 60.0
_AS_RANK = "as-rank"


class NothingFollower:
    """Another rank, of a model of nothing."""

    def join(self, group: RankGroup) -> None:
        self._group = group

    def prepare(self) -> None:
        pass

    def follow(self, _batch: StepBatch) -> None:
        self._group.all_reduce(torch.ones(1))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"nothing_ms": _nothing_ms(given.steps)}
    tell(f"a step of nothing over {NUM_RANKS} ranks: {found['nothing_ms']}")
    return found | (_compared(given) if given.model is not None else {})


def _nothing_ms(num_steps: int) -> dict[str, float]:
    """By the number of sequences in a step."""

    def start(descriptor: int) -> subprocess.Popen[bytes]:
        command = child_command("benchmarks.engine.tensor_parallel", _AS_RANK, str(descriptor), str(os.getpid()))
        return subprocess.Popen(command, env=child_environment(), pass_fds=[descriptor])

    ranks = Ranks(
        size=NUM_RANKS, device=torch.device("cpu"), settings={}, start=start, step_timeout_s=STEP_TIMEOUT_S
    )  # fmt: skip
    with closing(ranks):
        with ranks.loading():
            pass
        _median_nothing_ms(ranks, 1, 50 * num_steps)  # the first steps of two new processes are slower
        return {str(number): round(_median_nothing_ms(ranks, number, 50 * num_steps), 4) for number in (1, 64)}


def _median_nothing_ms(ranks: Ranks, num_sequences: int, num_steps: int) -> float:
    """Of decode steps."""
    blocks = [[at] for at in range(num_sequences)]
    took_s = []
    for step in range(num_steps):
        items = (
            ScheduledSequence(f"{at}", (at,), step, own, True, SamplingParams(max_tokens=1))
            for at, own in enumerate(blocks)
        )
        batch = StepBatch(tuple(items), ())
        began_at = time.perf_counter()
        with ranks.step(batch):
            ranks.group.all_reduce(torch.ones(1))
        took_s.append(time.perf_counter() - began_at)
    return 1e3 * statistics.median(took_s)


def _compared(given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of decode steps, by the number of sequences."""
    found: dict[str, Any] = {}
    with closing(_engine(given, num_threads=NUM_RANKS)) as alone, closing(_engine(given, num_ranks=NUM_RANKS)) as ranks:
        engines = {"two_threads": alone, "two_ranks": ranks}
        for number in given.sequences:
            for engine in engines.values():
                _fill(engine, number, num_tokens=given.steps + NUM_PROMPT_TOKENS)
            steps = [{name: _step_s(engine) for name, engine in engines.items()} for _ in range(given.steps)]
            row = {name: number / statistics.median(each[name] for each in steps) for name in engines}
            found[str(number)] = {f"{name}_tokens_per_s": round(value, 2) for name, value in row.items()} | {
                "ratio": round(row["two_ranks"] / row["two_threads"], 3)
            }
            tell(f"{number} sequences: {found[str(number)]}")
            for engine in engines.values():
                for at in range(number):
                    engine.abort(f"{at}")
                engine.step()
    return {"decode": found}


def _engine(given: argparse.Namespace, *, num_threads: int = 1, num_ranks: int = 1) -> Engine:
    most, blocks_each = max(given.sequences), 2 + (given.steps + 2 * NUM_PROMPT_TOKENS) // BLOCK_SIZE
    config = EngineConfig(
        model=ModelConfig(path=given.model, device="cpu", dtype=DTYPES[given.dtype], num_threads=num_threads),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=most * blocks_each),
        scheduler=SchedulerConfig(max_running=most),
    )
    return build_sync_engine(config, Devices(tensor_parallel=num_ranks, step_timeout_s=STEP_TIMEOUT_S))


def _fill(engine: Engine, number: int, *, num_tokens: int) -> None:
    """Begin so many sequences of different prompts, all of which run then."""
    for at in range(number):
        prompt = tuple(100 + (at * NUM_PROMPT_TOKENS + place) % 5000 for place in range(NUM_PROMPT_TOKENS))
        asked = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=f"{at}", prompt_token_ids=prompt, sampling=asked))
    while sum(bool(delta.token_ids) for delta in engine.step()) < number:
        pass


def _step_s(engine: Engine) -> float:
    began_at = time.perf_counter()
    engine.step()
    return time.perf_counter() - began_at


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.tensor_parallel", __doc__)
    parser.add_argument("--model", metavar="PATH", help="a folder, or whatever model.path takes; none: no engines")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="the model's number type (bf16)")
    parser.add_argument(
        "--sequences", type=positive, nargs="+", default=[1, 8, 32], metavar="N", help="at once (1 8 32)"
    )
    parser.add_argument("--steps", type=positive, default=30, metavar="N", help="that are measured (30)")
    return parser


def follow_as_rank(descriptor: int, parent: int) -> None:
    """The process of the other rank of the steps of nothing."""
    die_with(parent)
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=descriptor))
    settings = settings_of(channel.receive()[1])
    channel.send(Kind.SYNC)
    store, device = Path(settings["store"]), torch.device("cpu")
    group = RankGroup(settings["rank"], settings["size"], store=store, device=device, timeout_s=STEP_TIMEOUT_S)
    follow(channel, NothingFollower(), group)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == [_AS_RANK]:
        follow_as_rank(int(sys.argv[2]), int(sys.argv[3]))
        os._exit(0)
    sys.exit(main())
