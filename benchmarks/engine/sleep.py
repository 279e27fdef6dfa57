"""What sleep gives back and what waking costs, and two models that take turns on one device's memory.

    python -m benchmarks.engine.sleep --model DIR [DIR ...] [--quantization int8] [--wakes 5]
    python -m benchmarks.engine.sleep --model DIR DIR --turns 60 --streams 4

Each model is loaded in a process of its own, asked, put to sleep and asked again. Memory is the process's own share
(PSS, which divides pages that processes share among them). With `--turns` the engines have memory for the larger of
them only, and each is kept busy by some streams for as many seconds. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from app.assembly import Devices, build_engine, turns_of
from app.config import GIB, EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Request, SamplingParams
from app.engine.stats import SleepState
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.options import DTYPES

AFTER_S = 0.5
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 64, 64


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    configs = [_config(given, path) for path in given.model]
    if given.turns:
        if len(configs) != 2:
            raise BenchmarkError(f"--turns is for two models, got {len(configs)}: name two after --model")
        return _turns(configs, seconds=given.turns, num_streams=given.streams)
    return {Path(config.model.path).name: _in_a_process(_wakes, config, given.wakes) for config in configs}


# ---------------------------------------------------------------------- one model


def _wakes(config: EngineConfig, num_wakes: int) -> dict[str, Any]:
    """Figures of one model, in this process."""
    before, began_at = _pss_mib(), time.monotonic()
    engine = build_engine(config, Devices(sleep_after_s=AFTER_S))
    started_s = time.monotonic() - began_at

    async def main() -> dict[str, Any]:
        first = await _ask(engine, 0)
        awake = _pss_mib()
        warm_s = statistics.median([(await _ask(engine, 0)).first_token_s for _ in range(num_wakes)])
        asleep, wakes, firsts = [], [], []
        for _ in range(num_wakes):
            await asyncio.to_thread(_until_asleep, engine)
            asleep.append(_pss_mib())
            answer = await _ask(engine, 0)
            assert answer.token_ids == first.token_ids, "the same tokens"
            wakes.append(engine.sleep.last_wake_s)
            firsts.append(answer.first_token_s)
        return {
            "started_s": started_s, "wake_s": statistics.median(wakes), "wakes_s": wakes,
            "first_token_s": statistics.median(firsts), "first_token_awake_s": warm_s,
            "empty_mib": before, "awake_mib": awake, "asleep_mib": statistics.median(asleep), "again_mib": _pss_mib(),
        }  # fmt: skip

    figures = asyncio.run(main())
    engine.shutdown()
    tell(f"{config.model.path}: {figures}")
    return figures


def _until_asleep(engine: AsyncEngine) -> None:
    while engine.sleep.state is not SleepState.ASLEEP:
        time.sleep(0.05)


class _Answer:
    """One answer, and how long its first token took."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.first_token_s = 0.0
        self.lasted_s = 0.0


async def _ask(engine: AsyncEngine, number: int) -> _Answer:
    prompt = tuple(5 + (number * 31 + place * 7) % 200 for place in range(NUM_PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    unique = f"{number}-{time.monotonic_ns()}"  # as a salt it lets no answer find the prompt of another cached
    request = Request(request_id=unique, prompt_token_ids=prompt, sampling=sampling, cache_salt=unique)
    answer, began_at = _Answer(), time.monotonic()
    async for delta in engine.generate(request):
        if delta.token_ids and not answer.token_ids:
            answer.first_token_s = time.monotonic() - began_at
        answer.token_ids += delta.token_ids
    answer.lasted_s = time.monotonic() - began_at
    return answer


# ---------------------------------------------------------------------- two models in turns


def _turns(configs: Sequence[EngineConfig], *, seconds: int, num_streams: int) -> dict[str, Any]:
    needs = [_in_a_process(_needed_gib, config) for config in configs]
    memory_gib = max(needs) * 1.05
    tell(f"they need {needs[0]:.2f} and {needs[1]:.2f} GiB, and have {memory_gib:.2f} GiB together")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for config in configs:
        ours, theirs = context.Pipe()
        process = context.Process(target=_take_turns, args=(theirs, config, memory_gib, seconds, num_streams))
        process.start()
        assert ours.recv() == "ready"  # the second is loaded while the first sleeps
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    switching_s = sum(each["waking_s"] + each["sleeping_s"] for each in found)
    lasted_s = max(each["lasted_s"] for each in found)
    names = [f"{number} {Path(config.model.path).name}" for number, config in enumerate(configs, start=1)]
    return {
        "memory_gib": memory_gib,
        "needs_gib": needs,
        "switching_share": switching_s / lasted_s,
        **dict(zip(names, found, strict=True)),
    }


def _needed_gib(config: EngineConfig) -> float:
    turns = turns_of(config, Devices(sleep_after_s=AFTER_S))
    turns.close()
    return turns.num_bytes / GIB


def _take_turns(pipe: Connection, config: EngineConfig, memory_gib: float, seconds: int, num_streams: int) -> None:
    engine = build_engine(config, Devices(sleep_after_s=3600.0, memory_gib=memory_gib))

    async def main() -> dict[str, Any]:
        alone = [(await _ask(engine, number)).token_ids for number in range(num_streams)]
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        began, began_at = engine.sleep, time.monotonic()
        answers: list[_Answer] = []
        different = 0

        async def stream(number: int) -> None:
            nonlocal different
            while time.monotonic() < began_at + seconds:
                answer = await _ask(engine, number)
                different += answer.token_ids != alone[number]
                answers.append(answer)

        await asyncio.gather(*map(stream, range(num_streams)))
        ended = engine.sleep
        waits = sorted(answer.first_token_s for answer in answers)
        return {
            "answers": len(answers), "lost_or_different": different, "lasted_s": time.monotonic() - began_at,
            "wakes": ended.num_wakes - began.num_wakes, "waking_s": ended.waking_s - began.waking_s,
            "sleeping_s": ended.sleeping_s - began.sleeping_s, "queued_s": ended.queued_s - began.queued_s,
            "first_token_p50_s": waits[len(waits) // 2], "first_token_max_s": waits[-1],
        }  # fmt: skip

    pipe.send(asyncio.run(main()))
    engine.shutdown()


# ---------------------------------------------------------------------- processes


def _in_a_process(function: Any, *arguments: Any) -> Any:
    """What a function returns in a process that has loaded nothing else."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _pss_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _config(given: argparse.Namespace, path: str) -> EngineConfig:
    model = {"path": path, "device": "cpu", "quantization": given.quantization}
    if given.dtype:
        model["dtype"] = DTYPES[given.dtype]
    return EngineConfig.model_validate({"model": model, "cache": {"memory_gib": given.kv_gib}})


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.sleep", __doc__)
    parser.add_argument("--model", required=True, nargs="+", metavar="PATH", help="folders, or what model.path takes")
    parser.add_argument("--dtype", choices=list(DTYPES), default=None, help="number type (the machine's choice)")
    parser.add_argument(
        "--quantization", choices=("none", "int8", "int4"), default="none", help="of the weights (none)"
    )
    parser.add_argument("--kv-gib", type=float, default=1.0, metavar="GIB", help="KV memory (1)")
    parser.add_argument("--wakes", type=positive, default=5, metavar="N", help="that are measured (5)")
    parser.add_argument("--turns", type=positive, default=0, metavar="S", help="seconds of two models in turns")
    parser.add_argument("--streams", type=positive, default=4, metavar="N", help="at once at each, with --turns (4)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
