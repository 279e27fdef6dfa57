"""Attention against 64-bit numbers at the shapes of known models; then the tests of all kernels on this card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.errors import described
from app.model.attention import AttentionRules
from app.model.cuda.attention import TritonAttention
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.head_shapes import ON_GPU, STANDING_IN, HeadShape, attention_of, begun
from benchmarks.gpu.models import BLOCK_SIZE
from benchmarks.gpu.steps import GREEDY, step_of

_PROJECT = Path(__file__).resolve().parent.parent.parent
_TESTS_DEADLINE_S = 150
# Compilation for other cards needs no GPU, and is tested without one.
_TESTS = ("tests/model/cuda", "--ignore=tests/model/cuda/test_triton_compiles.py")


@torch.inference_mode()
def measure(bench: Bench) -> None:
    for shape in bench.sized(ON_GPU, STANDING_IN):
        for kind, error in _attention_errors(bench, shape).items():
            bench.row(
                "largest relative error against fp64", kernel=kind, shape=shape.model, error=float(f"{error:.3g}")
            )
    _run_tests(bench, bench.sized(_TESTS, ("tests/model/cuda/test_block_tables.py",)))


def _attention_errors(bench: Bench, shape: HeadShape) -> dict[str, float]:
    """Of a prompt in two pieces and of single tokens after it."""
    torch.manual_seed(0)
    prompt, single = bench.sized((1200, 4), (7, 2))
    length = prompt + single
    tensors, rules = shape.tensors(length, bench.device), shape.rules(bench.device)
    right = _in_fp64(*tensors, rules)
    num_blocks = -(-length // BLOCK_SIZE)
    attention = attention_of(bench, shape, num_blocks=num_blocks, max_rows=1)
    [whole] = step_of([(0, length)], num_blocks=num_blocks, block_size=BLOCK_SIZE).scheduled
    ends = [0, prompt // 2, prompt, *range(prompt + 1, length + 1)]
    errors: dict[str, float] = {}
    for start, end in pairwise(ends):
        kind = "prefill" if end - start > 1 else "decode"
        ours = _attended(attention, whole, start, end, tensors, rules)
        errors[kind] = max(errors.get(kind, 0.0), _largest_error(ours, right[start:end]))
    return errors


def _attended(
    attention: TritonAttention,
    whole: ScheduledSequence,
    start: int,
    end: int,
    tensors: Sequence[torch.Tensor],
    rules: AttentionRules,
) -> torch.Tensor:
    piece = ScheduledSequence("r", whole.token_ids[start:end], start, whole.block_ids, True, GREEDY)
    query, key, value = (each[start:end] for each in tensors)
    return begun(attention, StepBatch((piece,), ())).attend(0, query, key, value, rules)


def _in_fp64(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """The formula of attention over one sequence. [num_tokens, num_heads, dim], float64."""
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(each.double().repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * rules.scaling
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    at = torch.arange(query.shape[0], device=query.device)
    hidden = at[None, :] > at[:, None]
    if rules.sliding_window is not None:
        hidden |= at[None, :] <= at[:, None] - rules.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if rules.sinks is not None:
        scores = torch.cat([scores, rules.sinks.double()[:, None, None].expand(-1, len(at), 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(at)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def _largest_error(ours: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, relative to the size of the numbers that it is among."""
    size = right.square().mean().sqrt().clamp_min(1e-30)
    return float((ours.double() - right).abs().max() / size)


def _run_tests(bench: Bench, tests: Sequence[str]) -> None:
    """pytest without this project's options for it, some of which need plugins."""
    if find_spec("pytest") is None:
        bench.put(tests="pytest is not installed")
        return
    command = [
        sys.executable, "-m", "pytest", *tests, "-q", "-rf", "-c", "/dev/null", "--rootdir", ".", "-W", "default",
        "-p", "no:cacheprovider", "-p", "benchmarks.gpu", "--continue-on-collection-errors",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    try:
        done = subprocess.run(
            command, cwd=_PROJECT, env=environment, capture_output=True, text=True, check=False,
            timeout=_TESTS_DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        bench.put(tests=described(error)[:200])
        return
    (bench.out / "pytest.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    lines = done.stdout.strip().splitlines()
    bench.put(tests=lines[-1].strip("= ") if lines else done.stderr[-300:])
    for line in lines:
        if found := re.match(r"(FAILED|ERROR) (.*)", line):
            bench.row("failed tests", test=found[2][:200])
