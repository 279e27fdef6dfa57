"""A rank of the decoder for CUDA, in Triton's interpreter: python -m tests.model.parallel.cuda_rank JSON"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.batch import StepBatch
from app.model import verification
from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder
from app.model.inputs import build_inputs
from app.model.parallel.group import RankGroup
from app.model.ways.cuda_decoder import CudaModel
from app.model.ways.loaded_model import LoadedModel
from tests.kit.interpreter import quicken_interpreter
from tests.kit.models import load, scheduled

BLOCK_SIZE = 4
right = CudaModel.output
NUM_PROBE_TOKENS = 6  # of the comparison at load: less work for the interpreter


def group_of(rank: int, size: int, store: str) -> RankGroup:
    timeout_s = 240  # of a hang: the machine may be busy
    return RankGroup(rank, size, store=Path(store), device=torch.device("cpu"), timeout_s=timeout_s)


@torch.inference_mode()
def logits_of_tokens(model: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab_size], of a prompt of all but two tokens and of these one by one."""
    assert isinstance(model, CudaModel), "its weights are joined"
    blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    attention = TritonAttention(
        model.layers, num_blocks=len(blocks), block_size=BLOCK_SIZE, max_rows=1, max_blocks=len(blocks),
        dtype=model.dtype, device=model.device,
    )  # fmt: skip
    decoder = CudaDecoder(model.weights, attention, group=model.group)
    last, found = len(token_ids), []
    for start, end in ((0, last - 2), (last - 2, last - 1), (last - 1, last)):
        batch = StepBatch((scheduled(token_ids[start:end], start, blocks),), ())
        inputs = build_inputs(batch, block_size=BLOCK_SIZE, device=model.device)
        step = attention.begin_step(batch, inputs)
        found.append(decoder.compute(inputs.token_ids, inputs.positions, step).logits)
    return torch.cat(found)


def wrong(*given: Any) -> Any:
    """As a card that adds wrongly would compute it."""
    output = right(*given)
    return replace(output, logits=-output.logits)


def main() -> None:
    asked = json.loads(sys.argv[1])
    quicken_interpreter(pytest.MonkeyPatch())
    TritonAttention.fits = staticmethod(lambda device: device.type != "meta")  # type: ignore[method-assign]
    verification.NUM_TOKENS = NUM_PROBE_TOKENS
    group = group_of(asked["rank"], asked["size"], asked["store"])
    if asked.get("is_wrong", False):
        CudaModel.output = wrong  # type: ignore[method-assign]
    model = load(asked["path"], block_size=BLOCK_SIZE, group=group)
    print("null" if not isinstance(model, CudaModel) else logits_of_tokens(model, asked["token_ids"]).tolist())


if __name__ == "__main__":
    main()
