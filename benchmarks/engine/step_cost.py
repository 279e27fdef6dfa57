"""How much longer a decode step gets when some of its sequences ask for the most that a request may ask for.

    python -m benchmarks.engine.step_cost [--rows 32] [--vocabulary 128000] [--of FEATURE ...]

The engine, the scheduler and the sampler are the real ones; the forward pass costs nothing (its logits are drawn once),
so a ratio here is an upper bound. The table has the median of a decode step, in milliseconds, with none, one and four
such sequences among the rows, and how much longer the step is in which one joins with its whole prompt cached than
that of a sequence which asks for nothing. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from app.assembly import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.batch import StepBatch
from app.engine.engine import Engine
from app.engine.request import ModelInfo, Request, SamplingParams
from app.model.cpu.library import Team
from app.model.cpu.sampling import NativeAdjust, NativeDraw, NativeLogprobs
from app.model.forward import Prediction
from app.model.inputs import ModelInputs
from app.model.runner import TorchModelRunner
from benchmarks.harness.command import command_parser, positive, run_command, tell

BLOCK_SIZE = 16
EOS = 2
LONG_PROMPT, LONG_OUTPUT = 32_768, 8_192  # tokens
MAX_TOKENS = 1_000

_random = random.Random(7)


def _tokens(count: int) -> tuple[int, ...]:
    return tuple(_random.randrange(100, 100_000) for _ in range(count))


# Per feature: fields of the sampling parameters, and of the request. Each is at the most that the API accepts.
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "presence and frequency penalty, 8k output": (
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"generated_token_ids": _tokens(LONG_OUTPUT)},
    ),
    "repetition_penalty, 32k prompt": (
        {"repetition_penalty": 1.1},
        {"prompt_token_ids": _tokens(LONG_PROMPT)},
    ),
    "logit_bias, 1,024 entries": ({"logit_bias": tuple((token, 0.5) for token in _tokens(1024))}, {}),
    "bad_words, 256 of several tokens": ({"bad_words": tuple(_tokens(1 + n % 64) for n in range(256))}, {}),
    "bad_words, 256 of one repeated token": (
        {"bad_words": tuple((7,) * (2 + n) for n in range(256))},
        {"generated_token_ids": (7,) * 1000},
    ),
    "min_tokens, 128 stop_token_ids": ({"min_tokens": MAX_TOKENS, "stop_token_ids": _tokens(128)}, {}),
    "allowed_token_ids, 16,384": ({"allowed_token_ids": _tokens(16_384)}, {}),
    "allowed_token_ids with bad_words": (
        {"allowed_token_ids": _tokens(16_384), "bad_words": tuple(_tokens(1) for _ in range(256))},
        {},
    ),
    "logprobs, 20": ({"logprobs": 20}, {}),
    "top_k 64,000": ({"top_k": 64_000}, {}),
    "top_p 0.9": ({"top_p": 0.9}, {}),
    "min_p 0.001": ({"min_p": 0.001}, {}),
    "top_k, top_p, min_p": ({"top_k": 64_000, "top_p": 0.99, "min_p": 1e-6}, {}),
    "temperature 2": ({"temperature": 2.0}, {}),
    "all of them": (
        {
            "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
            "logit_bias": tuple((token, 0.5) for token in _tokens(1024)),
            "bad_words": tuple((7,) * (2 + n) for n in range(256)),
            "min_tokens": MAX_TOKENS, "stop_token_ids": _tokens(128), "logprobs": 20,
            "top_k": 64_000, "top_p": 0.99, "min_p": 1e-6,
        },
        {"prompt_token_ids": _tokens(LONG_PROMPT), "generated_token_ids": (7,) * LONG_OUTPUT},
    ),
}  # fmt: skip


class DrawnLogits:
    """A ForwardPass that takes no time: the same random logits at every step, rounded as a model's are."""

    block_size = BLOCK_SIZE

    def __init__(self, *, rows: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits = (torch.randn(rows, vocab_size, generator=generator) * 3).bfloat16().float()
        self._likeliest = self._logits.argmax(-1)

    def predict(self, batch: StepBatch, inputs: ModelInputs) -> Prediction:
        num_rows = inputs.logits_indices.shape[0]
        return Prediction(self._logits[:num_rows], self._likeliest[:num_rows])


def measure(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # as in a replica with the native decoder
    team = Team(given.threads)
    runner = TorchModelRunner(
        DrawnLogits(rows=given.rows, vocab_size=given.vocabulary), torch.device("cpu"),
        draw=NativeDraw(team), adjust=NativeAdjust(team), compute_logprobs=NativeLogprobs(team),
    )  # fmt: skip
    chosen = [name for name in FEATURES if not given.of or any(part in name for part in given.of)]
    found: dict[str, dict[str, float]] = {}
    tell(f"{'':44}{'none':>8}{'one':>8}{'four':>8}{'ratio 1':>9}{'ratio 4':>9}{'joins':>8}")
    for name in chosen:
        none, one, four = (_median_ms(runner, given, name, number) for number in (0, 1, 4))
        joins = _join_ms(runner, given, name)
        row = {"none_ms": none, "one_ms": one, "four_ms": four, "join_ms": joins}
        found[name] = {key: round(value, 3) for key, value in row.items()}
        tell(f"{name:44}{none:8.2f}{one:8.2f}{four:8.2f}{one / none:9.2f}{four / none:9.2f}{joins:8.2f}")
    return {"rows": given.rows, "vocabulary": given.vocabulary, "features": found}


def _engine(runner: TorchModelRunner, given: argparse.Namespace) -> Engine:
    return assemble(
        SchedulerConfig(max_running=given.rows, max_step_tokens=LONG_PROMPT + 4096, prefill_chunk_tokens=LONG_PROMPT),
        CacheConfig(block_size=BLOCK_SIZE),
        num_blocks=16 * (LONG_PROMPT + LONG_OUTPUT + MAX_TOKENS) // BLOCK_SIZE,
        runner=runner,
        facts=ModelInfo(max_model_len=65_536, vocab_size=given.vocabulary, eos_token_ids=(EOS,)),
    )


def _add(engine: Engine, given: argparse.Namespace, name: str | None, number: int, *, asks: bool = True) -> None:
    sampling, fields = FEATURES[name] if name is not None else ({}, {})
    sampling = sampling if asks else {}
    max_tokens = MAX_TOKENS + len(fields.get("generated_token_ids", ()))
    asked = SamplingParams(
        **{"max_tokens": max_tokens, "seed": number, "ignore_eos": True, "temperature": given.temperature} | sampling
    )
    request = Request(request_id=f"{name} {number}", prompt_token_ids=_tokens(64), sampling=asked)
    engine.add(replace(request, **fields))


def _median_ms(runner: TorchModelRunner, given: argparse.Namespace, name: str, number: int) -> float:
    engine = _engine(runner, given)
    for row in range(given.rows):
        _add(engine, given, name if row < number else None, row)
    while engine.stats().num_running < given.rows or engine.stats().num_waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    return statistics.median(_step_ms(engine) for _ in range(given.steps))


def _join_ms(runner: TorchModelRunner, given: argparse.Namespace, name: str) -> float:
    """How much longer the step is in which one joins with its prompt cached than that of one that asks for nothing."""
    engine = _engine(runner, given)
    for row in range(given.rows - 4):
        _add(engine, given, None, row)
    took_ms = []
    for row, asks in enumerate((False, False, True), start=given.rows):
        _add(engine, given, name, row, asks=asks)
        took_ms.append(_step_ms(engine))
        for _ in range(12):
            engine.step()
    return took_ms[2] - took_ms[1]


def _step_ms(engine: Engine) -> float:
    began_at = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - began_at)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.step_cost", __doc__)
    parser.add_argument("--rows", type=positive, default=32, metavar="N", help="sequences in a step (32)")
    parser.add_argument("--vocabulary", type=positive, default=128_000, metavar="N", help="tokens (128,000)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="of the sampler (2)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of all rows (1)")
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="that are measured (40)")
    parser.add_argument("--of", action="append", metavar="FEATURE", help="only features with this in their name")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
