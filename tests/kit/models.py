"""What tests of models share: settings, loaded models, steps by hand, and what transformers computes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.config import EngineConfig, ModelConfig
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.logit_adjustments import LogitAdjustments
from app.engine.matcher import TokenSet
from app.engine.request import Request, SamplingParams
from app.engine.state_pool import NO_STATE, StatePath
from app.model.attention import AttentionRules, PagedAttention
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, is_fast
from app.model.implementations import native_decoder
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.native_decoder import NativeModel
from app.model.inputs import build_inputs
from app.model.loader import load_model
from app.model.parallel.group import RankGroup
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT = [(7 * at * at + 3) % VOCAB_SIZE for at in range(70)]
BLOCKS = [3, 8, 1, 0, 9]  # of the prompt, of 16 tokens
EMPTY: Mapping[str, Any] = MappingProxyType({})


def config_of(
    path: Path | str,
    *,
    cache: Mapping[str, Any] = EMPTY,
    scheduler: Mapping[str, Any] = EMPTY,
    speculation: Mapping[str, Any] = EMPTY,
    **model: Any,
) -> EngineConfig:
    """On a CPU, in the checkpoint's own type, unless the settings say otherwise."""
    rest = {"cache": dict(cache), "scheduler": dict(scheduler), "speculation": dict(speculation)}
    return EngineConfig.model_validate({"model": {"path": str(path), "device": "cpu"} | model} | rest)


def load(
    path: Path | str,
    *,
    checks: Path | None = None,
    block_size: int = 16,
    group: RankGroup | None = None,
    **model: Any,
) -> LoadedModel:
    """On a CPU, in float32, unless the settings say otherwise."""
    config = ModelConfig.model_validate({"path": str(path), "device": "cpu", "dtype": "float32"} | model)
    return load_model(config, str(path), block_size=block_size, checks=checks, group=group)


def load_native(path: Path | str, **model: Any) -> NativeModel:
    """In C++, where this machine can."""
    dtype = model.get("dtype", "float32")
    if not is_fast(DTYPES[dtype]):
        pytest.skip(f"this CPU has no vector instructions for {dtype}, or there is no C++ compiler")
    loaded = load(path, **model)
    assert isinstance(loaded, NativeModel)
    return loaded


def computing_otherwise(patch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Models that are loaded from now on have these settings in C++, and not their own."""
    right = native_decoder.settings_of
    patch.setattr(native_decoder, "settings_of", lambda *given: replace(right(*given), **settings))


def own_model(path: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """As transformers has it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", **options)
    return model.eval()  # type: ignore[no-any-return]


def generate_plainly(model: PreTrainedModel | Path, requests: Sequence[Request]) -> dict[str, list[int]]:
    """The tokens of the model's own greedy `generate`, of all requests at once: prompts are padded on the left."""
    model = own_model(model) if isinstance(model, Path) else model
    assert model.generation_config is not None, "it generates"
    model.generation_config.eos_token_id = None
    longest = max(len(each.prompt_token_ids) for each in requests)
    padding = [longest - len(each.prompt_token_ids) for each in requests]
    output: torch.Tensor = model.generate(  # type: ignore[operator]
        input_ids=torch.tensor([(0,) * n + each.prompt_token_ids for n, each in zip(padding, requests, strict=True)]),
        attention_mask=torch.tensor([(0,) * n + (1,) * (longest - n) for n in padding]),
        do_sample=False, pad_token_id=0, max_new_tokens=max(each.sampling.max_tokens for each in requests),
    )  # fmt: skip
    return {
        each.request_id: row[longest : longest + each.sampling.max_tokens].tolist()
        for each, row in zip(requests, output, strict=True)
    }


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.float(), expected.float()
    return float(torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected))


def scheduled(
    token_ids: Sequence[int] | int,
    start: int = 0,
    block_ids: list[int] | None = None,
    *,
    request_id: str = "r",
    samples: bool = True,
    prompt: tuple[int, ...] = (),
    generated: tuple[int, ...] = (),
    allowed: Sequence[int] = (),
    vocab_size: int = VOCAB_SIZE,
    model_info: Mapping[str, Any] = EMPTY,
    **sampling: Any,
) -> ScheduledSequence:
    """A sequence's part of a step. token_ids: a number stands for as many of any.

    prompt, generated: what penalties count. allowed: by a matcher, where there are any. facts: other fields.
    """
    params = SamplingParams(**{"max_tokens": 9} | sampling)
    adjustments = LogitAdjustments(params, prompt) if params.adjusts_logits else None
    if adjustments is not None:
        adjustments.follow(generated)
    return ScheduledSequence(
        request_id, (1,) * token_ids if isinstance(token_ids, int) else tuple(token_ids), start,
        [0] if block_ids is None else block_ids, samples, params, adjustments=adjustments,
        matcher=TokenSet(allowed, vocab_size=vocab_size) if allowed else None, **model_info,
    )  # fmt: skip


def attend(
    attention: PagedAttention,
    items: Sequence[ScheduledSequence],
    qkv: Sequence[torch.Tensor],
    rules: AttentionRules,
) -> torch.Tensor:
    batch, (query, key, value) = StepBatch(tuple(items), ()), qkv
    inputs = build_inputs(batch, block_size=attention.block_size, device=query.device)
    return attention.begin_step(batch, inputs).attend(0, query, key, value, rules)


def poison(pages: NativeKVCache) -> None:
    """What another sequence may have left."""
    for memory in pages.tensors:
        memory.fill_(float("nan") if memory.is_floating_point() else -1)  # -1: NaN in both types


def decoder_of(model: LoadedModel, *, num_threads: int = 2, in_int8: bool = False) -> NativeDecoder:
    """in_int8: its KV memory."""
    assert isinstance(model, NativeModel)
    num_blocks = 32
    pages = NativeKVCache(model.layers, num_blocks=num_blocks, block_size=16, dtype=model.dtype, in_int8=in_int8)
    poison(pages)
    return NativeDecoder(model.weights, pages, ThreadPool(num_threads), num_slots=num_blocks * _SLOTS)


_SLOTS = 256  # for states of a sequence: one behind each number of its tokens


def chunk(
    token_ids: Sequence[int], start: int, size: int, block_ids: list[int], *, samples: bool = True
) -> ScheduledSequence:
    """Some tokens of a sequence. Its states lie in slots that its first block has for itself."""
    slot = block_ids[0] * _SLOTS + start
    states = StatePath(slot if start else NO_STATE, ((size, slot + size),))
    return scheduled(token_ids[start : start + size], start, block_ids, samples=samples, model_info={"states": states})


@torch.inference_mode()
def step(decoder: NativeDecoder, *items: ScheduledSequence, has_numbers: bool = True) -> torch.Tensor:
    """The logits of a step. has_numbers: all of them."""
    batch = StepBatch(items, ())
    prediction = decoder.predict(batch, build_inputs(batch, block_size=decoder.block_size, device=CPU))
    assert prediction.likeliest is not None
    assert not has_numbers or torch.equal(prediction.likeliest, prediction.logits.argmax(dim=-1))
    return prediction.logits


def logits_of(model: LoadedModel) -> torch.Tensor:
    """After the prompt, in C++."""
    return step(decoder_of(model), chunk(PROMPT, 0, 70, BLOCKS))[0]


def check_same_bits_in_any_step(model: LoadedModel, *, in_int8: bool = False) -> tuple[NativeDecoder, torch.Tensor]:
    """In one step alone, token by token, in chunks beside others, on other threads.

    Returns the last decoder, which has the prompt in BLOCKS, and the logits after it.
    """
    whole = step(decoder_of(model, in_int8=in_int8), chunk(PROMPT, 0, 70, BLOCKS))[0]

    single = decoder_of(model, num_threads=1, in_int8=in_int8)
    for at in range(70):
        last = step(single, chunk(PROMPT, at, 1, BLOCKS))[0]
    assert torch.equal(last, whole)

    crowded = decoder_of(model, num_threads=3, in_int8=in_int8)
    backwards = PROMPT[::-1]
    for start, size in ((0, 33), (33, 5), (38, 31), (69, 1)):
        beside = chunk(backwards, start, 1, [2, 7, 4, 5, 6])
        rows = step(crowded, beside, chunk(PROMPT, start, size, BLOCKS), chunk(backwards, 0, 40, [10, 11, 12]))
    assert torch.equal(rows[1], whole)
    return crowded, whole
