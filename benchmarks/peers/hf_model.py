"""A transformers model as the peers take it: no paging of ours, no code of ours in its way."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from app.config import ModelConfig
from app.model.location import resolve_model_path
from benchmarks.engine.engine_setup import dtype_name, resolve_device
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.options import DTYPES, Options
from benchmarks.harness.workload import Workload


def load_hf_model(options: Options) -> Any:
    """Load the weights with torch's own attention (sdpa).

    Raises:
        BenchmarkError: there is no such model, or no such device.
    """
    torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: torch sees no CUDA device")
    dtype = getattr(torch, DTYPES[peer_dtype(options)])
    try:
        model = AutoModelForCausalLM.from_pretrained(
            resolve_model_path(options.model), dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{options.model} cannot be loaded: {error}") from error
    return model.eval().to(device)


def peer_dtype(options: Options) -> str:
    """The engine's own default where none is given, so that the two stay comparable."""
    device = resolve_device(options.device)
    return options.dtype or dtype_name(ModelConfig(path=options.model, device=device))


def check_greedy(workload: Workload) -> None:
    """Raises BenchmarkError when a request samples: the peers are measured greedily."""
    sampled = next((timed for timed in workload.requests if not timed.request.sampling.is_greedy), None)
    if sampled is not None:
        raise BenchmarkError(f"request {sampled.request.request_id!r} has a temperature; the peers run greedily")
