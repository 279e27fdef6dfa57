"""The graphs that steps replay: captured alone, watched, and replaced by a stand-in if there is no GPU.

A stand-in run executes the GPU code on a CPU: kernels run in Triton's interpreter, and graphs do their work again. Its
times say nothing about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from operator import sub
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

import app.model.implementations.gpu
from app.config import EngineConfig
from app.engine.model_runner import ModelRunner
from app.model.cuda.captured_inputs import graph_sizes, mixed_sizes
from benchmarks.harness.command import BenchmarkError

Work = Callable[[], torch.Tensor]


def captured(function: Work, device: torch.device) -> Work:
    """Return a graph of the work, captured as in the engine: without it, the host would be slower than the device."""
    replay: Work = vars(app.model.implementations.gpu)["CudaCapture"](device)(function)
    return replay


@dataclass(slots=True)
class Replays:
    """The graphs that are captured while `watched` is active."""

    num_graphs: int = 0
    last: Work | None = None  # of the last launched step; None: the step had no graph

    @contextmanager
    def watched(self) -> Iterator[Replays]:
        """Record the graphs of all runners that are built within this context."""
        real: Callable[[torch.device], Any] = vars(app.model.implementations.gpu)["CudaCapture"]

        def capture_on(device: torch.device) -> Callable[[Work], Work]:
            capture = real(device)
            return lambda function: self._noting(capture(function))

        with patch("app.model.implementations.gpu.CudaCapture", capture_on):
            yield self

    def check(self, config: EngineConfig, runner: ModelRunner, *, times: int = 1) -> None:
        """Raise BenchmarkError if graphs are missing: slower eager steps would give plausible but wrong figures.

        times: how often the runner has captured its steps.
        """
        limits = config.scheduler
        mixed = mixed_sizes(max_rows=limits.max_running, max_tokens=limits.max_step_tokens)
        expected = times * (1 + runner.adapts) * (len(graph_sizes(limits.max_running)) + len(mixed))
        if self.num_graphs < expected:
            raise BenchmarkError(
                f"{self.num_graphs} of {expected} CUDA graphs were captured: steps without a graph are slower; the "
                f"warnings above say why"
            )

    def _noting(self, replay: Work) -> Work:
        self.num_graphs += 1

        def noted() -> torch.Tensor:
            self.last = replay
            return replay()

        return noted


class WorkAgain:
    """A stand-in for `CudaCapture`. Like a graph, it writes each result to the place of the first result."""

    def __init__(self, device: torch.device) -> None:
        """device: not used."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = function()
        return lambda: output.copy_(function())


def plain_varlen_attn(*given: Any, **named: Any) -> torch.Tensor:
    """Stand in for torch's function, as documented. Checks the arguments that the function would check.

    The function is imported here because its import takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    call = signature(varlen_attn).bind(*given, **named).arguments
    query, key, value = call["query"], call["key"], call["value"]
    assert all(each.is_contiguous() for each in (key, value))
    ends = [call[name].tolist() for name in ("cu_seq_q", "cu_seq_k")]
    assert all(call[name].dtype == torch.int32 for name in ("cu_seq_q", "cu_seq_k"))
    assert call["max_q"] == max(map(sub, ends[0][1:], ends[0]))
    assert call["max_k"] == max(map(sub, ends[1][1:], ends[1]))
    before, after = call["window_size"]
    assert after == 0
    output = torch.full_like(query, torch.nan)
    for queries, keys in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True):
        own, others = slice(*queries), slice(*keys)
        num_queries, num_keys = own.stop - own.start, others.stop - others.start
        at = torch.arange(num_keys - num_queries, num_keys)[:, None]  # the last query sees the last key
        seen = torch.arange(num_keys)
        visible = (seen <= at) & ((before == -1) | (seen >= at - before))
        shared = query.shape[1] // key.shape[1]
        of_heads = [query[own], *(each[others].repeat_interleave(shared, dim=1) for each in (key, value))]
        of_query, of_key, of_value = (each.transpose(0, 1) for each in of_heads)
        attended = functional.scaled_dot_product_attention(
            of_query, of_key, of_value, attn_mask=visible, scale=call["scale"]
        )
        output[own] = attended.transpose(0, 1)
    return output


# Replacements of torch's FlashAttention, which CPUs lack, by the names in the module that uses it.
LIBRARY = {"varlen_attn": plain_varlen_attn, "_DTYPES": (torch.float32, torch.bfloat16)}
_UNVERIFIED = {
    "app.model.implementations.loaded_model.LoadedModel.difference_in_steps": lambda *_: None,
    "app.model.cuda.graph_runner.GraphModelRunner._difference_of_replays": lambda _runner: None,
}


@contextmanager
def standing_in(is_so: bool = True, *, verifies: bool = False) -> Iterator[None]:
    """Let the engine treat the CPU as a GPU: it uses Triton's kernels and graphs where it would on a GPU.

    verifies: also verify the steps of each model. There are many steps, and the interpreter is slow.
    """
    with ExitStack() as patches:
        if not is_so:
            yield
            return
        for name, replacement in {
            "app.model.cuda.attention.TritonAttention.fits": staticmethod(lambda device: True),
            "app.model.implementations.gpu.CudaCapture": WorkAgain,
            "app.model.verification.NUM_TOKENS": 4,
            "torch.cuda.synchronize": lambda device=None: None,
            **{f"app.model.cuda.library_attention.{name}": each for name, each in LIBRARY.items()},
            **({} if verifies else _UNVERIFIED),
        }.items():
            patches.enter_context(patch(name, replacement))
        yield
