"""The whole engine on requests of ragged lengths, in this process: graphs, overlap and batch invariance on and off."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.engine.engine import Engine
from benchmarks.engine.carousel import Carousel
from benchmarks.engine.run import Run, warmed_up
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.graphs import Replays
from benchmarks.gpu.models import engine_config, engine_of, made_model
from benchmarks.harness.timeline import times_of
from benchmarks.harness.workload import TimedRequest, Workload, read_workload
from benchmarks.make_workload import make_workload

# Settings of the model, and whether steps overlap.
AS_SERVED = "graphs, overlap"
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "no overlap": ({}, False),
    "no graphs": ({"backend": "eager"}, True),
    "batch_invariant": ({"batch_invariant": True}, True),
}


def measure(bench: Bench) -> None:
    workload = requests_for(bench)
    max_running = bench.sized(256, 2)
    longest = max(timed.max_total_tokens for timed in workload.requests)
    sizes: dict[str, Any] = {
        "max_running": max_running,
        "max_model_len": longest + BLOCK_SIZE,
        "num_blocks": max_running * (longest // BLOCK_SIZE + 1),
    }
    model = made_model(engine_config(bench, **sizes))
    for name in bench.parts("variant", [AS_SERVED] if bench.stage == "engine" else VARIANTS):
        settings, overlaps = VARIANTS.get(name, ({}, True))
        config = engine_config(bench, **sizes, **settings)
        with Replays().watched() as replays:
            engine = engine_of(config, model, overlaps=overlaps)
        cells = served(engine, workload)
        if config.model.backend == "auto":
            replays.check(config, engine.runner)
        bench.row("engine", variant=name, **cells)
        if name == AS_SERVED:
            bench.put(output_tokens_per_s=cells["output_tokens_per_s"])


def served(engine: Engine, workload: Workload, *, begin: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Return the figures of the requests after a warm-up. begin: called after the warm-up and before the requests."""
    contender = Carousel(engine)
    warmed_up(contender, workload)
    contender.forget()
    begin()
    return cells_of(workload, contender.serve(workload))


def requests_for(bench: Bench) -> Workload:
    """Return the same requests for every engine: lengths as in ShareGPT, all at once, greedy."""
    vocab_size = bench.sized(150_000, 320)
    lines = make_workload("sharegpt", vocab_size=vocab_size, num_requests=bench.sized(512, 2))
    file = bench.out / "sharegpt.jsonl"
    part = file.with_suffix(f".{os.getpid()}")  # several processes of a stage write equal files
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    part.replace(file)
    workload = read_workload(str(file))
    return workload if not bench.stands_in else Workload(tuple(map(_short, workload.requests)))


def cells_of(workload: Workload, run: Run) -> dict[str, Any]:
    """Return the figures of one run."""
    seconds = times_of(run.answered, (50, 99))
    times = {name: None if value is None else round(value * 1e3, 2) for name, value in seconds.items()}
    return {
        "seconds": round(run.seconds, 3),
        "num_output_tokens": run.num_output_tokens,
        "output_tokens_per_s": round(run.num_output_tokens / run.seconds, 1),
        "total_tokens_per_s": round((workload.num_prompt_tokens + run.num_output_tokens) / run.seconds, 1),
        **{name.removesuffix("_s") + "_ms": value for name, value in times.items()},
        "steps": run.num_steps,
        "failed": len(run.timelines) - len(run.answered),
    }


def _short(timed: TimedRequest) -> TimedRequest:
    request = timed.request
    return replace(
        timed,
        request=replace(
            request,
            prompt_token_ids=request.prompt_token_ids[:4],
            sampling=replace(request.sampling, max_tokens=2),
        ),
    )
