"""A rank of the C++ decoder beside the one in the test: python -m tests.model.parallel.native_rank JSON"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from app.config import ModelConfig
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from app.errors import UnsupportedModel
from app.model import loader
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import Team
from app.model.cpu.weights import NativeWeights, pack_weights
from app.model.inputs import build_inputs
from app.model.loader import LoadedModel, load_native_rank
from app.model.parallel.group import RankGroup

GREEDY = SamplingParams(max_tokens=1)


def group_of(rank: int, size: int, store: str) -> RankGroup:
    timeout_s = 240  # of a hang: the machine may be busy
    return RankGroup(rank, size, store=Path(store), device=torch.device("cpu"), timeout_s=timeout_s)


def config_of(path: str, dtype: str, quantization: str) -> ModelConfig:
    return ModelConfig(path=path, device="cpu", dtype=dtype, quantization=quantization)  # type: ignore[arg-type]


@torch.inference_mode()
def logits_of_steps(model: LoadedModel, token_ids: Sequence[int], num_prompt: int) -> list[torch.Tensor]:
    """The last logits after the prompt, in two pieces, and after each token behind it. Of ranks, rank 0 has them."""
    assert model.native is not None
    pages = NativeKVCache(model.layers, num_blocks=16, block_size=16, dtype=model.dtype)
    decoder = NativeDecoder(model.native, pages, Team(1), memory=model.ranks)
    starts = [0, num_prompt // 2, *range(num_prompt, len(token_ids))]
    found = []
    for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        piece = ScheduledSequence("r", tuple(token_ids[start:end]), start, list(range(16)), True, GREEDY)
        batch = StepBatch((piece,), ())
        inputs = build_inputs(batch, block_size=16, device=torch.device("cpu"))
        found.append(decoder.predict(batch, inputs).logits)
    return found


def without_output(*given: Any, **options: Any) -> NativeWeights:
    """Weights with which this rank adds nothing to the first layer's attention."""
    weights = pack_weights(*given, **options)
    weights.layers[0].output.zero_()
    return weights


def main() -> None:
    asked = json.loads(sys.argv[1])
    group = group_of(asked["rank"], asked["size"], asked["store"])
    config = config_of(asked["path"], asked["dtype"], asked["quantization"])
    if not asked.get("has_library", True):
        loader.library = lambda: None  # type: ignore[attr-defined]
    if asked.get("is_wrong", False):
        loader.pack_weights = without_output  # type: ignore[attr-defined]
    try:
        model = load_native_rank(config, config.path, group, block_size=16, checks=None)
    except UnsupportedModel:
        print("refused")
        return
    if model is not None:
        logits_of_steps(model, asked["token_ids"], asked["num_prompt"])
    print("computed" if model is not None else "not native")


if __name__ == "__main__":
    main()
