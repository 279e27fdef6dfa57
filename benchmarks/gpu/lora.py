"""Measure the cost of LoRA adapters in a step: the same sequences with and without adapters, in turn.

The adapters are random and change every linear layer of the 8B shape; each has its own slot. Sequence N has adapter N
modulo the number of adapters. Each round runs every kind once, and each ratio is the median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch

from app.engine.batch import StepBatch
from app.engine.model_runner import ModelRunner
from app.model.adapters import AdapterWeights, LowRankUpdate, Sizes
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.models import engine_config, made_model, prepared_runner
from benchmarks.gpu.steps import blocks_needed, step_of
from benchmarks.harness.turns import median_of_ratios, turns

_NUM_ADAPTERS = 8
_WITHOUT = "none"


@torch.inference_mode()
def measure(bench: Bench) -> None:
    sequences, context, tokens = bench.sized((32, 1024, 2048), (2, 5, 3))
    num_slots = bench.sized(_NUM_ADAPTERS, 2)
    decode, prompt = [(context - 1, 1)] * sequences, [(0, tokens)]
    num_blocks = max(blocks_needed(each) for each in (decode, prompt))
    config = engine_config(
        bench, max_running=sequences, max_step_tokens=tokens, max_model_len=max(context, tokens) + BLOCK_SIZE,
        num_blocks=num_blocks, max_loaded_adapters=num_slots, device="auto",
    )  # fmt: skip
    model = made_model(config)
    (runner, _), slots = prepared_runner(config, model), model.adapters
    assert slots is not None, "the decoder for CUDA computes this shape"
    bench.put(adapter_memory_gib=round(sum(each.nbytes for each in slots.tensors()) / 2**30, 3))
    for rank in bench.parts("rank", bench.sized((16, 64), (3,))):
        weights = _random_adapter(slots.sizes, rank)
        began_at = time.perf_counter()
        loaded = [slots.load(weights) for _ in range(num_slots)]
        bench.put(**{f"load_s_of_rank_{rank}": round((time.perf_counter() - began_at) / num_slots, 3)})
        for name, pieces in (("decode", decode), ("prompt", prompt)):
            kinds = {
                _WITHOUT if not number else str(number): step_of(
                    pieces, num_blocks=num_blocks, adapters=loaded[:number]
                )
                for number in bench.sized((0, 1, num_slots), (0, num_slots))
            }
            _put(bench, runner, name, rank, kinds)
        for each in loaded:
            slots.free(each)


def _put(bench: Bench, runner: ModelRunner, name: str, rank: int, kinds: Mapping[str, StepBatch]) -> None:
    """Time steps of each kind in turn. The kinds are named by their number of adapters."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _, kind in turns(list(kinds), rounds=bench.sized(7, 1)):
        batch = kinds[kind]
        seconds[kind].append(bench.seconds_in_a_row(lambda batch=batch: runner.launch(batch)))  # type: ignore[misc]
    for kind, times in seconds.items():
        ratio = median_of_ratios(times, seconds[_WITHOUT])
        bench.row(
            "steps with adapters", step=name, tokens=kinds[kind].num_tokens, rank=rank, adapters=kind,
            step_ms=round(statistics.median(times) * 1e3, 3), ratio=ratio,
        )  # fmt: skip
        if name == "decode" and kind != _WITHOUT:
            bench.put(**{f"ratio_{kind}_of_rank_{rank}": ratio})


def _random_adapter(sizes: Mapping[str, Sizes], rank: int) -> AdapterWeights:
    torch.manual_seed(rank)
    return {
        name: LowRankUpdate(torch.randn(rank, each.num_inputs) * 0.02, torch.randn(each.num_outputs, rank) * 0.02)
        for name, each in sizes.items()
    }
