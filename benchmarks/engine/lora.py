"""What LoRA adapters cost: the same sequences with adapters and without, in turn.

    python -m benchmarks.engine.lora [--model models/demo] [--sequences 32] [--adapters 8] [--rank 16]

One engine serves all sequences at once, each with a prompt of 32 tokens; sequence N has adapter N modulo their number.
The adapters are random and adapt every linear layer of attention and MLP. `ratio` is the median over the rounds of a
decode step with adapters over one without, from the same round; `total_ratio` is of all steps, prompts included.
Tokens are sampled, so that sequences differ, and the end token does not end them: both compute as many steps. The
target is a ratio of at most 1.15. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.assembly import adapter_at, build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.engine import Engine
from app.engine.request import Adapter, Request, SamplingParams
from app.model.cpu.decoder import NativeDecoder
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.random_adapter import save_random_adapter
from benchmarks.harness.turns import median_of_ratios, turns

WITHOUT, WITH = "without", "with"
TARGET = 1.15
PROMPT_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The median decode step of each kind, in ms, and their ratio."""
    engine = build_sync_engine(_config(given))
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            _made(engine, Path(folder) / f"{number}", rank=given.rank, seed=number) for number in range(given.adapters)
        ]
        kinds: dict[str, list[Adapter]] = {WITHOUT: [], WITH: adapters}
        for each in kinds.values():  # loads the adapters
            _serve(engine, each, given, seed=0)
        steps: dict[str, list[float]] = {name: [] for name in kinds}
        totals: dict[str, list[float]] = {name: [] for name in kinds}
        for number, name in turns(list(kinds), rounds=given.rounds):
            step_s, total_s = _serve(engine, kinds[name], given, seed=number)
            steps[name].append(1000 * step_s)
            totals[name].append(total_s)
            tell(f"round {number} of {given.rounds}: {name}: {steps[name][-1]:.2f} ms a decode step")
    ratio = median_of_ratios(steps[WITH], steps[WITHOUT])
    return {
        "model": given.model,
        "dtype": given.dtype,
        "sequences": given.sequences,
        "adapters": given.adapters,
        "rank": given.rank,
        "step_ms": {name: round(statistics.median(values), 3) for name, values in steps.items()},
        "ratio": ratio,
        "ratios": [round(a / b, 4) for a, b in zip(steps[WITH], steps[WITHOUT], strict=True)],
        "total_ratio": median_of_ratios(totals[WITH], totals[WITHOUT]),
        "target": TARGET,
        "is_met": ratio is not None and ratio <= TARGET,
    }


def _config(given: argparse.Namespace) -> EngineConfig:
    blocks = given.sequences * (-(-(PROMPT_TOKENS + given.tokens) // 16) + 1)
    return EngineConfig(
        model=ModelConfig(
            path=given.model,
            dtype=given.dtype,
            num_threads=given.threads,
            quantization=given.quantization,
            max_loaded_adapters=given.adapters,
        ),
        cache=CacheConfig(num_blocks=blocks, prefix_caching=False),
        scheduler=SchedulerConfig(
            max_running=given.sequences, max_step_tokens=given.sequences * PROMPT_TOKENS, prefill_chunk_tokens=256
        ),
    )


def _made(engine: Engine, folder: Path, *, rank: int, seed: int) -> Adapter:
    """A random adapter of every linear layer, as PEFT writes it."""
    forward = getattr(engine.runner, "forward", None)
    if not isinstance(forward, NativeDecoder):
        raise BenchmarkError("the model does not run in the C++ decoder here; take one that does")
    save_random_adapter(folder, forward.linear_sizes(), rank=rank, seed=seed)
    return adapter_at(folder.name, str(folder))


def _serve(engine: Engine, adapters: Sequence[Adapter], given: argparse.Namespace, *, seed: int) -> tuple[float, float]:
    """Seconds of the median step that only decodes, with all sequences, and of all steps."""
    for index in range(given.sequences):
        sampling = SamplingParams(max_tokens=given.tokens, seed=seed * given.sequences + index, ignore_eos=True)
        request = Request(
            request_id=f"{index}",
            prompt_token_ids=tuple(range(40 + index, 40 + index + PROMPT_TOKENS)),
            sampling=sampling,
            adapter=adapters[index % len(adapters)] if adapters else None,
        )
        engine.add(request)
    decode_s, began_at = [], time.perf_counter()
    while engine.has_work:
        is_decoding = len(engine.running) == given.sequences and all(each.is_decoding for each in engine.running)
        step_began_at = time.perf_counter()
        engine.step()
        if is_decoding:
            decode_s.append(time.perf_counter() - step_began_at)
    return statistics.median(decode_s), time.perf_counter() - began_at


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.lora", __doc__)
    parser.add_argument("--model", default="models/demo", metavar="DIR")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--sequences", type=positive, default=32, metavar="N", help="at once (32)")
    parser.add_argument("--adapters", type=positive, default=8, metavar="N", help="among them (8)")
    parser.add_argument("--rank", type=positive, default=16, metavar="N", help="of each adapter (16)")
    parser.add_argument("--tokens", type=positive, default=96, metavar="N", help="that each sequence generates (96)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of the model (2)")
    parser.add_argument("--rounds", type=positive, default=10, metavar="N", help="runs of each kind (10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
