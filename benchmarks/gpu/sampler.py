"""Measure the drawing of tokens: a step of a model with one thin layer and a whole vocabulary, without its replay.

Steps go through the runner as in the engine, so each way to draw is measured. If the draw is part of the graph, its
time is part of the replay.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import TokenSet
from app.engine.request import SamplingParams
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import engine_config, made_model, prepared_runner
from benchmarks.gpu.steps import step_of

TOP_P = "top-p 0.9"
GRAMMAR = "top-p 0.9, grammar"
PENALTIES = "top-p 0.9, penalties"
DRAWS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "T = 1": SamplingParams(max_tokens=1, temperature=1.0, seed=7),
    TOP_P: SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=7),
    "top-k 50, top-p 0.9": SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.9, seed=7),
    GRAMMAR: SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=7),
    PENALTIES: SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, seed=7, frequency_penalty=0.5, repetition_penalty=1.1,
        logit_bias=((3, 1.0),),
    ),
    "20 log-probabilities": SamplingParams(max_tokens=1, temperature=0.0, logprobs=20),
}  # fmt: skip
_NUM_SEEN = 1000  # tokens that penalties count, in the prompt and in the output


def beside(name: str, sampling: SamplingParams, vocab_size: int) -> dict[str, Any]:
    """Return the grammar or the penalties of one sequence."""
    if name == GRAMMAR:
        return {"matcher": TokenSet(range(0, vocab_size, 8), vocab_size=vocab_size)}
    if name != PENALTIES:
        return {}
    adjustments = LogitAdjustments(sampling, [token * 7 % vocab_size for token in range(_NUM_SEEN)])
    adjustments.follow([token * 5 % vocab_size for token in range(_NUM_SEEN)])
    return {"adjustments": adjustments}


@torch.inference_mode()
def measure(bench: Bench) -> None:
    numbers = bench.sized((64, 256), (2,))
    config = engine_config(
        bench, "sampling", max_running=max(numbers), max_step_tokens=bench.sized(512, 8), max_model_len=32,
        num_blocks=max(numbers),
    )  # fmt: skip
    model = made_model(config)
    runner, replays = prepared_runner(config, model)
    bench.put(vocabulary=model.model_info.vocab_size)
    # The draw with a target comes first.
    names = sorted(DRAWS, key=lambda name: name != TOP_P)
    for name, number in bench.parts("draw", product(names, numbers)):
        sampling = DRAWS[name]
        batch = step_of(
            [(7, 1)] * number, num_blocks=max(numbers), sampling=sampling,
            beside=partial(beside, name, sampling, model.model_info.vocab_size),
        )  # fmt: skip
        step_s = bench.seconds_in_a_row(lambda: runner.launch(batch), repeat=50)  # noqa: B023 - called at once
        replay_s = bench.seconds(replays.last, repeat=50) if replays.last is not None else 0.0
        draw_s = step_s - replay_s
        of_step = bench.of_earlier("decode", f"step_{number}x1024_ms")
        share = round(draw_s * 1e3 / of_step, 4) if of_step else None
        bench.row(
            "draws", rows=number, draw=name, step_us=round(step_s * 1e6, 1), replay_us=round(replay_s * 1e6, 1),
            draw_us=round(draw_s * 1e6, 1), share_of_8b_step=share,
        )  # fmt: skip
        if name == TOP_P:
            bench.put(**{f"top_p_share_{number}": share})
