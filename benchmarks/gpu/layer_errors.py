"""A model of one layer at its real width, through the whole runner, against transformers' code in 64-bit numbers.

Whatever kernels the engine chooses for such a model are in it: norms, positions, products, attention, head, logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import AutoConfig

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import BLOCK_SIZE, engine_config, engine_of, made_model, random_module

_SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1)
_ID = "scored"


@torch.inference_mode()
def logprob_errors(bench: Bench, shape: str) -> dict[str, float]:
    """The largest differences of log-probabilities in a prompt's two pieces and in decode steps after it.

    They are relative to the spread of the logits. The weights are the same: both are drawn from one seed.
    """
    prompt, single = bench.sized((200, 8), (4, 1))
    num_blocks = -(-(prompt + single) // BLOCK_SIZE)
    config = engine_config(
        bench, shape, max_running=2, max_step_tokens=bench.sized(256, 4), max_model_len=num_blocks * BLOCK_SIZE,
        num_blocks=num_blocks,
    )  # fmt: skip
    model = made_model(config)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.facts.vocab_size, (prompt + single,), generator=generator).tolist()
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
    """Log-probabilities of every next token. [num_tokens, vocab_size] float64."""
    found = AutoConfig.from_pretrained(path)
    module = random_module(found, torch.bfloat16, bench.device, attention="eager").double()
    module.set_experts_implementation("eager")  # the other ways to multiply experts take no 64-bit numbers
    logits: torch.Tensor = module(torch.tensor([token_ids], device=bench.device), use_cache=False).logits[0]
    return logits.double().log_softmax(dim=-1).cpu()
