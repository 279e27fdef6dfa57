"""The stages of a run, in their order. The module of a stage has `measure(bench)`, which puts figures on the bench."""

from __future__ import annotations

from typing import NamedTuple


class Stage(NamedTuple):
    """One stage. Times in seconds, for a GPU of a data centre."""

    name: str
    module: str
    expected_s: int
    measures: str

    @property
    def deadline_s(self) -> int:
        """After so long it is stopped: what a first run compiles may take as long again."""
        return 2 * self.expected_s + 30


STAGES = (
    Stage("rates", "benchmarks.gpu.rates", 20, "versions, the card, rates of copies and of matrix products"),
    Stage("kernels", "benchmarks.gpu.kernels", 100, "every kernel against fp64, then the tests of the kernels"),
    Stage("memory", "benchmarks.gpu.memory", 50, "an 8B model's start; memory predicted against used; the worst step"),
    Stage(
        "decode",
        "benchmarks.gpu.decode",
        100,
        "decode steps by replay against bytes / rate of copies; weights or KV in FP8",
    ),
    Stage(
        "profile", "benchmarks.gpu.profiled", 30, "kernels, launches, gaps and waits of a decode step and a mixed one"
    ),
    Stage("attention", "benchmarks.gpu.attention", 80, "decode GB/s, prefill TFLOP/s; stages x warps x tile"),
    Stage("experts", "benchmarks.gpu.experts", 15, "a layer's experts against the bytes of those that are chosen"),
    Stage("lora", "benchmarks.gpu.lora", 60, "decode steps and prompts with LoRA adapters against none"),
    Stage("sampler", "benchmarks.gpu.sampler", 15, "draws: greedy, T = 1, top-p, top-k, grammar, penalties, logprobs"),
    Stage("engine", "benchmarks.gpu.engine", 110, "the whole engine on requests of ragged lengths"),
    Stage("transformers", "benchmarks.gpu.transformers_batching", 50, "transformers' own batching, the same requests"),
    Stage("faults", "benchmarks.gpu.faults", 20, "the engine after an illegal address and a lack of memory"),
)
