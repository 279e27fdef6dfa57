"""transformers as a peer: no paging of ours, no code of ours in its way."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from app.config import ModelConfig
from app.model.location import resolve_model_path
from benchmarks.engine.engine_setup import dtype_name, resolve_device
from benchmarks.engine.run import Contender, Setup
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.options import DTYPES
from benchmarks.harness.workload import Workload
from benchmarks.peers.hf_continuous import TransformersContinuous
from benchmarks.peers.hf_static import StaticBatches

PEERS: dict[str, Callable[[Any], Contender]] = {
    "hf-generate": lambda model: StaticBatches(model, batch_size=1),  # plainly, one request at a time
    "hf-static-8": lambda model: StaticBatches(model, batch_size=8),
    "hf-static-32": lambda model: StaticBatches(model, batch_size=32),
    "hf-continuous": TransformersContinuous,
}


def load_peer(given: argparse.Namespace, workload: Workload) -> tuple[Contender, Setup]:
    """Load the weights with torch's own attention (sdpa).

    Raises:
        BenchmarkError: there is no such model or no such device, or a request samples: peers are measured greedily.
    """
    sampled = next((timed for timed in workload.requests if not timed.request.sampling.is_greedy), None)
    if sampled is not None:
        raise BenchmarkError(f"request {sampled.request.request_id!r} has a temperature; the peers run greedily")
    torch.set_num_threads(given.threads)
    device = resolve_device(given.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: torch sees no CUDA device")
    # The engine's own default where none is given, so that the two stay comparable.
    dtype = given.dtype or dtype_name(ModelConfig(path=given.model, device=device))
    tell(f"loading {given.model} for {given.name}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(given.model), dtype=getattr(torch, DTYPES[dtype]), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{given.model} cannot be loaded: {error}") from error
    setup = Setup(
        engine=given.name, model=given.model, workload=given.workload, dtype=dtype, threads=given.threads,
        device=device, settings=[],
    )  # fmt: skip
    return PEERS[given.name](model.eval().to(device)), setup
