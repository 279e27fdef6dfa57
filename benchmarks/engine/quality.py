"""Measure the loss of quality by quantised weights and KV memory, on texts that the original model wrote.

    python -m benchmarks.engine.quality --model DIR [--quantization int8 int4 fp8] [--dtype bf16] [--texts N]

The original model answers `--texts` prompts, sampled at temperature 1 with a seed for each, and again greedily. Both
models then read all prompts with these answers (teacher-forced), and each token is compared. The figures are: the mean
log-likelihood and the ratio of the perplexities over the sampled texts; how often both models find one token likeliest
in these texts; and the share of the greedy tokens that the quantised model also finds likeliest. The standard error of
the ratio treats texts as independent, but not the tokens of one text. `divergence` is half the mean square of a token's
difference: it estimates the Kullback-Leibler divergence in nats, and so the ratio's logarithm, with less noise. `floor`
has the figures of the original model in the other number type, which also rounds. `--kv int8` or `fp8` adds keys and
values in that type, alone and with each matching kind of weights. `fp8` rounds the weights and inputs of the layers'
products, or keys and values, as on a GPU, and computes in transformers' code; no GPU is needed. The last line of stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, get_args

import torch
from torch import nn

from app.build import assemble, build_sync_engine
from app.config import CacheConfig, EngineConfig, KvType, ModelConfig, SchedulerConfig
from app.engine.engine import Engine
from app.engine.request import MergedDelta, Request, SamplingParams, TokenDelta, TokenLogprobs
from app.model.attention import TorchAttention
from app.model.cpu.weights import BITS
from app.model.cuda.fp8 import in_fp8
from app.model.forward import TransformersForward
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import KVCache, num_blocks_that_fit
from app.model.loader import load_model
from app.model.location import resolve_model_path
from app.model.runner import TorchModelRunner
from app.text.tokenizer import Tokenizer
from benchmarks.harness.command import command_parser, positive, run_command, tell
from benchmarks.harness.options import DTYPES

SUBJECTS = (
    "the tides", "a bicycle", "winter in the mountains", "how bread is made", "the number seven", "a lighthouse",
    "honey bees", "a night train", "the history of paper", "growing tomatoes", "chess", "a lost key",
    "volcanoes", "learning to swim", "the moon", "a village market", "sorting a list", "rain", "an old library",
    "electric motors",
)  # fmt: skip
TASKS = (
    "Write a short paragraph about {}.", "Explain {} to a child.", "List three facts about {}.",
    "Tell a short story about {}.", "Write a letter to a friend about {}.", "What should everyone know about {}?",
    "Describe {} in two sentences.", "Ask me two questions about {}.", "Give some practical advice about {}.",
    "Write a dialogue of two people about {}.",
)  # fmt: skip
RUNNING = 32
_KV_GIB = 0.5
KINDS = [*(kind for kind, bits in BITS.items() if bits), "fp8"]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with an answer, as tokens."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compare the models. They are built one after the other, because two may not fit in memory."""
    other_dtype = next(name for short, name in DTYPES.items() if short != given.dtype)
    model = ModelConfig(path=given.model, device="cpu", dtype=DTYPES[given.dtype], num_threads=given.threads)
    tell(f"{model.path} writes {2 * given.texts} texts")
    engine = _engine(model)
    prompts = _prompts(Tokenizer.load(resolve_model_path(model.path)), given.texts)
    sampled, greedy = (_answers(engine, prompts, given.tokens, temperature=temperature) for temperature in (1.0, 0.0))
    own = [_read(engine, texts) for texts in (sampled, greedy)]
    engine.close()
    figures: dict[str, Any] = {"num_tokens": sum(map(len, own[0])), "mean_log_likelihood": _mean(own[0])}
    weights = {kind: model.model_copy(update={"quantization": kind}) for kind in given.quantization}
    others: list[tuple[str, ModelConfig, KvType]] = [(kind, other, "auto") for kind, other in weights.items()]
    if given.kv != "auto":
        others += [(f"kv {given.kv}", model, given.kv)]
        others += [
            (f"{kind}, kv {given.kv}", other, given.kv)
            for kind, other in weights.items()
            if (kind == "fp8") == (given.kv == "fp8")  # FP8 is for GPUs, the other types are for CPUs
        ]
    for name, other, kv in (*others, ("floor", model.model_copy(update={"dtype": other_dtype}), "auto")):
        tell(f"{name}: {other.dtype}, weights {other.quantization}, KV memory {kv}")
        engine = _engine_in_fp8(other, kv) if "fp8" in (other.quantization, kv) else _engine(other, kv)
        figures[name] = compared(own, [_read(engine, texts) for texts in (sampled, greedy)])
        tell(f"{figures[name]}")
        engine.close()
    return figures


_Scores = list[TokenLogprobs]  # of the tokens of one answer


def compared(own: Sequence[list[_Scores]], other: Sequence[list[_Scores]]) -> dict[str, float]:
    """Compare two models. `own` and `other` each have the scores of the sampled texts and of the greedy texts."""
    sampled, greedy = (
        [list(zip(*text, strict=True)) for text in zip(*both, strict=True)] for both in zip(own, other, strict=True)
    )
    losses = [[mine.logprob - theirs.logprob for mine, theirs in text] for text in sampled]
    tokens = [loss for text in losses for loss in text]
    # The standard error of a token's mean difference in log-likelihood; texts are independent of each other.
    error = math.hypot(*(sum(text) - fmean(tokens) * len(text) for text in losses)) / len(tokens)
    ratio = math.exp(_mean(own[0]) - _mean(other[0]))
    return {
        "mean_log_likelihood": _mean(other[0]),
        "perplexity_ratio": round(ratio, 6),
        "divergence": round(fmean(loss**2 for loss in tokens) / 2, 6),
        "standard_error": round(ratio * error, 6),
        "same_top_token": _same(sampled),
        "same_greedy_token": _same(greedy),
    }


def _mean(texts: list[_Scores]) -> float:
    return round(fmean(score.logprob for text in texts for score in text), 6)


def _same(texts: Sequence[Sequence[tuple[TokenLogprobs, ...]]]) -> float:
    """Return how often both models find one token likeliest."""
    return round(fmean(mine.top_token_ids[0] == theirs.top_token_ids[0] for text in texts for mine, theirs in text), 6)


def _engine(model: ModelConfig, kv: KvType = "auto") -> Engine:
    cache = CacheConfig(memory_gib=_KV_GIB, dtype=kv)
    return build_sync_engine(EngineConfig(model=model, cache=cache, scheduler=SchedulerConfig(max_running=RUNNING)))


def _engine_in_fp8(model: ModelConfig, kv: KvType) -> Engine:
    """Return an engine on transformers' code with the products of the layers, the keys and values, or both in FP8."""
    config = EngineConfig(
        model=model.model_copy(update={"backend": "torch", "quantization": "none"}),
        scheduler=SchedulerConfig(max_running=RUNNING),
    )
    torch.set_num_threads(model.num_threads or 1)
    loaded = load_model(config.model, resolve_model_path(model.path))
    assert isinstance(loaded, TransformersModel), "other backends have their own weights"
    for layer in loaded.module.base_model.layers if model.quantization == "fp8" else ():
        for parent in [*layer.modules()]:
            for name, child in [*parent.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Fp8Linear(child))
    num_blocks = num_blocks_that_fit(CacheConfig(memory_gib=_KV_GIB), loaded.layers, dtype=loaded.dtype)
    cache = (RoundedKVCache if kv == "fp8" else KVCache)(
        loaded.layers,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    forward = TransformersForward(loaded.module, TorchAttention(cache, loaded.device))
    runner = TorchModelRunner(forward, loaded.device)
    return assemble(config.scheduler, config.cache, num_blocks=num_blocks, runner=runner, model_info=loaded.model_info)


class RoundedKVCache(KVCache):
    """Keys and values rounded as in FP8, with one more rounding of each value to the model's type."""

    def write(
        self, place: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, part: int = 0
    ) -> None:
        super().write(place, slots, _rounded(keys), _rounded(values), part=part)


def _rounded(heads: torch.Tensor) -> torch.Tensor:
    """Round [num_tokens, num_kv_heads, dim] to FP8 and back, with a scale for each token and head."""
    values, scales = in_fp8(heads.reshape(-1, heads.shape[-1]))
    return (values.float() * scales).to(heads.dtype).view(heads.shape)


class Fp8Linear(nn.Module):
    """A linear layer that computes like `app/model/cuda/fp8.py`, except for the order of sums."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scales = in_fp8(linear.weight.detach())
        self._values, self._scales = values.float().t(), scales.t()
        self._bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = in_fp8(x.flatten(0, -2))
        output = values.float() @ self._values * scales * self._scales
        output = output if self._bias is None else output + self._bias
        return output.to(x.dtype).view(*x.shape[:-1], -1)


def _prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    asked = [TASKS[(at + at // len(SUBJECTS)) % len(TASKS)].format(SUBJECTS[at % len(SUBJECTS)]) for at in range(count)]
    if not tokenizer.has_chat_template:
        return tokenizer.encode_all(asked)
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in asked]


def _answers(engine: Engine, prompts: Sequence[tuple[int, ...]], num_tokens: int, *, temperature: float) -> list[Text]:
    samplings = [SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=at) for at in range(len(prompts))]
    answers = _run(engine, prompts, samplings)
    return [Text(prompt + answer.token_ids, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


def _read(engine: Engine, texts: Sequence[Text]) -> list[_Scores]:
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=1)
    scored = _run(engine, [text.token_ids for text in texts], [sampling] * len(texts))
    # The first token of a prompt has no score.
    return [list(each.prompt_logprobs[text.num_prompt_tokens - 1 :]) for each, text in zip(scored, texts, strict=True)]


def _run(engine: Engine, prompts: Sequence[tuple[int, ...]], samplings: Sequence[SamplingParams]) -> list[TokenDelta]:
    deltas: dict[str, list[TokenDelta]] = {}
    for at, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        deltas[f"{at}"] = []
        engine.add(Request(request_id=f"{at}", prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return [MergedDelta(*of_one).delta() for of_one in deltas.values()]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.quality", __doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="a folder, or another value of model.path")
    parser.add_argument(
        "--kv", choices=get_args(KvType), default="auto", help="also measure keys and values of this type (auto)"
    )
    parser.add_argument(
        "--quantization", nargs="*", choices=KINDS, default=KINDS[:-1], help="types of the weights (int8 int4)"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="number type of both models (bf16)")
    parser.add_argument("--texts", type=positive, default=200, metavar="N", help="number of prompts (200)")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="most tokens of an answer (64)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="threads of the models (1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
