"""Compare every kernel with 64-bit numbers at the shapes of known models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import AutoConfig

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from app.errors import described
from app.model.attention import AttentionRules
from app.model.cuda.attention import TritonAttention
from app.model.cuda.batch_invariant import invariant_mean, invariant_mm
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.head_shapes import ON_GPU, STANDING_IN, HeadShape, attention_of, begun
from benchmarks.gpu.models import LAYERS, engine_config, engine_of, made_model, random_module
from benchmarks.gpu.steps import GREEDY, step_of

_SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1)
_ID = "scored"
# Rows, depth and columns of matrix products of an 8B model: joined QKV, gate and up, down, and the head.
_PRODUCTS = ((64, 4096, 6144), (256, 4096, 24576), (64, 12288, 4096), (64, 4096, 151936))


@torch.inference_mode()
def measure(bench: Bench) -> None:
    for shape in bench.parts("attention", bench.sized(ON_GPU, STANDING_IN)):
        for kind, error in _attention_errors(bench, shape).items():
            bench.row("largest relative error against fp64", kernel=kind, shape=shape.model, error=_short(error))
    for rows, depth, columns in bench.parts("product", bench.sized(_PRODUCTS, ((3, 16, 20),))):
        _invariant_errors(bench, rows, depth, columns)
    for name in bench.parts("layer", LAYERS):
        try:
            errors, refused = _logprob_errors(bench, name), None
        except Exception as failure:  # the remaining layers are still measured
            errors, refused = {"": float("nan")}, described(failure)[:200]
        for kind, error in errors.items():
            bench.row(
                "log-probabilities of one layer against fp64",
                model=name,
                step=kind,
                error=None if refused else _short(error),
                refused=refused,
            )


def _attention_errors(bench: Bench, shape: HeadShape) -> dict[str, float]:
    """Return the errors of a prompt in two pieces and of single tokens after the prompt."""
    torch.manual_seed(0)
    prompt, single = bench.sized((1200, 4), (7, 2))
    length = prompt + single
    tensors, rules = shape.tensors(length, bench.device), shape.rules(bench.device)
    right = _in_fp64(*tensors, rules)
    num_blocks = -(-length // BLOCK_SIZE)
    attention = attention_of(bench, shape, num_blocks=num_blocks, max_rows=1)
    [whole] = step_of([(0, length)], num_blocks=num_blocks).scheduled
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
    """Compute attention over one sequence by its formula. [num_tokens, num_heads, dim], float64."""
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


def _invariant_errors(bench: Bench, rows: int, depth: int, columns: int) -> None:
    left, right = (
        torch.randn(size, device=bench.device).bfloat16() for size in ((rows, depth), (columns, depth))
    )  # the layout of a linear layer's weight
    for kind, ours, exact in (
        ("batch-invariant product", invariant_mm(left, right.t()), left.double() @ right.t().double()),
        ("batch-invariant mean", invariant_mean(left, [-1]), left.double().mean(-1)),
    ):
        bench.row(
            "largest relative error against fp64", kernel=kind, shape=f"{rows} x {depth} x {columns}",
            error=_short(_largest_error(ours, exact)),
        )  # fmt: skip


def _largest_error(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference, relative to the root mean square of the right numbers."""
    size = right.square().mean().sqrt().clamp_min(1e-30)
    return float((ours.double() - right).abs().max() / size)


def _short(number: float) -> float:
    return float(f"{number:.3g}")


@torch.inference_mode()
def _logprob_errors(bench: Bench, shape: str) -> dict[str, float]:
    """Compare a model of one layer at its real width, in the whole runner, with transformers' code in 64-bit numbers.

    The test covers the kernels that the engine chooses for such a model: norms, positions, products, attention, head,
    logits. Returns the largest differences of log-probabilities in a prompt's two pieces and in the decode steps after
    it, relative to the spread of the logits. Both models draw equal weights from one seed.
    """
    prompt, single = bench.sized((200, 8), (4, 1))
    num_blocks = -(-(prompt + single) // BLOCK_SIZE)
    config = engine_config(
        bench, shape, max_running=2, max_step_tokens=bench.sized(256, 4), max_model_len=num_blocks * BLOCK_SIZE,
        num_blocks=num_blocks,
    )  # fmt: skip
    model = made_model(config)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.model_info.vocab_size, (prompt + single,), generator=generator).tolist()
    exact = _exact(bench, config.model.path, token_ids)
    spread = float(exact.std())
    runner = engine_of(config, model).runner
    assert runner.launches, "on a GPU steps are launched"
    whole = ScheduledSequence(_ID, tuple(token_ids), 0, list(range(num_blocks)), True, _SCORED)
    errors: dict[str, float] = {"prompt": 0.0, "decode": 0.0}
    for start, end in ((0, prompt // 2), (prompt // 2, prompt)):
        targets = tuple(token_ids[start + 1 : end + 1])
        ours = runner.run(_piece(whole, start, end, targets)).prompt_logprobs[_ID]
        for at, (target, found) in enumerate(zip(targets, ours, strict=True), start=start):
            errors["prompt"] = max(errors["prompt"], abs(found.logprob - float(exact[at, target])))
    for at in range(prompt, prompt + single):
        result = runner.run(_piece(whole, at, at + 1, ()))
        difference = result.logprobs[_ID][0].logprob - float(exact[at, result.token_ids[0]])
        errors["decode"] = max(errors["decode"], abs(difference))
    return {kind: error / spread for kind, error in errors.items()}


def _piece(whole: ScheduledSequence, start: int, end: int, targets: tuple[int, ...]) -> StepBatch:
    sampling = replace(_SCORED, prompt_logprobs=1 if targets else None)
    item = ScheduledSequence(
        _ID, whole.token_ids[start:end], start, whole.block_ids, True, sampling, targets=targets,
        first_target=start + 1 if targets else 0,
    )  # fmt: skip
    return StepBatch((item,), (), has_logprobs=True)


def _exact(bench: Bench, path: str, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of every next token. [num_tokens, vocab_size] float64."""
    found = AutoConfig.from_pretrained(path)
    module = random_module(found, torch.bfloat16, bench.device, attention="eager").double()
    module.set_experts_implementation("eager")  # other implementations of experts refuse 64-bit numbers
    logits: torch.Tensor = module(torch.tensor([token_ids], device=bench.device), use_cache=False).logits[0]
    return logits.double().log_softmax(dim=-1).cpu()
