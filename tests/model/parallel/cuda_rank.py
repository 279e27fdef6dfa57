"""A rank of the decoder for CUDA, in Triton's interpreter."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from app.engine.batch import StepBatch
from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.loaded_model import LoadedModel
from app.model.inputs import build_inputs
from app.model.parallel.group import RankGroup
from tests.kit.models import load, scheduled

BLOCK_SIZE = 4
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


def answer(
    pipe: Connection, rank: int, size: int, store: str, path: str, token_ids: Sequence[int], settings: Mapping[str, Any]
) -> None:
    """Sends the logits of another rank, in a process that was forked for it; None where it runs transformers' code."""
    gc.freeze()  # the end of a group of the process before would wait for threads that are not forked
    torch.set_num_threads(1)
    model = load(path, block_size=BLOCK_SIZE, group=group_of(rank, size, store), num_threads=1, **settings)
    pipe.send(logits_of_tokens(model, token_ids).tolist() if isinstance(model, CudaModel) else None)
