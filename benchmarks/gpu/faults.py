"""Test the engine after an illegal address and after a lack of memory in a step, each in its own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch

from app.build import assemble
from app.config import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.batch import DeviceLost, StepBatch, StepResult
from app.engine.model_runner import ModelRunner, PendingStep
from app.engine.request import Request, SamplingParams
from app.errors import CarouselError
from app.model.inputs import build_inputs
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.children import in_processes
from benchmarks.gpu.head_shapes import ON_GPU, attention_of
from benchmarks.gpu.models import engine_config, made_model
from benchmarks.gpu.steps import step_of

_DEADLINE_S = 60.0  # of a case, with the start of its process and model
_NUM_TOKENS = 4
_FAILING_STEP = 3


def measure(bench: Bench) -> None:
    for case in bench.parts("fault", CASES):
        [child] = in_processes(bench, run_case, [(case,)], deadline_s=_DEADLINE_S)
        bench.row("faults", fault=case, process=child.end, **child.figures)


def run_case(bench: Bench, case: str) -> None:
    """Run one case in its own process."""
    bench.put(**asyncio.run(_served(bench, CASES[case])))


async def _served(bench: Bench, fault: Callable[[Bench], None]) -> dict[str, Any]:
    """Serve streams with a failing step, and one request after them."""
    num_streams = bench.sized(4, 2)
    config = engine_config(
        bench, "sampling", max_running=num_streams, max_step_tokens=bench.sized(64, 8), max_model_len=64, num_blocks=64
    )
    runner = _Failing(_runner_of(config), lambda: fault(bench))
    engine = AsyncEngine(
        assemble(config.scheduler, config.cache, num_blocks=64, runner=runner, model_info=runner.model_info),
        max_requests=100,
    )
    ends = await asyncio.gather(*[_streamed(engine, f"{number}") for number in range(num_streams)])
    ended_at = time.perf_counter()
    after = await _streamed(engine, "after")
    return {
        "streams": _counted(ends),
        "ms_to_last_end": round((ended_at - (runner.failed_at or ended_at)) * 1e3, 1),
        "next_request": after,
    }


def _runner_of(config: EngineConfig) -> tuple[ModelRunner, Any]:
    model = made_model(config)
    runner = model.runner(config, num_blocks=64, num_threads=1)
    assert runner.launches, "on a GPU steps are launched"
    return runner, model.model_info


async def _streamed(engine: AsyncEngine, name: str) -> str:
    """Serve a request and return how it ended, in words."""
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=(5, 6, 7), sampling=sampling)
    num_tokens = 0
    try:
        async for delta in engine.generate(request):
            num_tokens += len(delta.token_ids)
    except CarouselError as error:
        return type(error).__name__
    return "answered" if num_tokens == _NUM_TOKENS else f"{num_tokens} of {_NUM_TOKENS} tokens"


def _counted(ends: list[str]) -> str:
    return ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))


class _Failing(ModelRunner):
    """A runner that meets a fault in one of its steps."""

    launches = True

    def __init__(self, built: tuple[ModelRunner, Any], fault: Callable[[], None]) -> None:
        self._runner, self.model_info = built
        self._fault = fault
        self._num_launches = 0
        self.failed_at: float | None = None

    def prepare(self) -> None:
        self._runner.prepare()

    def run(self, batch: StepBatch) -> StepResult:
        return self.launch(batch).result()

    def launch(self, batch: StepBatch) -> PendingStep:
        self._num_launches += 1
        if self._num_launches == _FAILING_STEP:
            self.failed_at = time.perf_counter()
            self._fault()
        return self._runner.launch(batch)


def _illegal_address(bench: Bench) -> None:
    """Let one of our kernels write to an unmapped address; the device reports the error at the next wait."""
    if bench.stands_in:
        raise DeviceLost("as a device does after an illegal address")
    shape = ON_GPU[0]
    attention = attention_of(bench, shape, num_blocks=1, max_rows=1)
    batch = step_of([(0, 1)], num_blocks=1)
    inputs = build_inputs(batch, block_size=BLOCK_SIZE, device=bench.device)
    inputs.slots[0].fill_(2**36)
    attention.begin_step(batch, inputs).attend(0, *shape.tensors(1, bench.device), shape.rules(bench.device))


def _too_little_memory(bench: Bench) -> None:
    torch.empty(2**50, dtype=torch.uint8, device=bench.device)


CASES: dict[str, Callable[[Bench], None]] = {
    "illegal address": _illegal_address,
    "out of memory": _too_little_memory,
}
