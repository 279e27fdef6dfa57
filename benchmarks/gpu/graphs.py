"""The graphs that steps replay: made by themselves, watched, and what takes their place where there is no GPU.

A run that stands in has the code of a GPU around it: its kernels run in Triton's interpreter, graphs do their work
again. Nothing of that says anything about speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

import app.model.ways.gpu
from app.config import EngineConfig
from app.engine.model_runner import ModelRunner
from app.model.cuda.captured_inputs import graph_sizes, mixed_sizes
from benchmarks.harness.command import BenchmarkError

Work = Callable[[], torch.Tensor]


def captured(function: Work, device: torch.device) -> Work:
    """A graph of the work, as the engine captures it: the host would be slower than the device."""
    replay: Work = vars(app.model.ways.gpu)["CudaCapture"](device)(function)
    return replay


@dataclass(slots=True)
class Replays:
    """The graphs that are captured while it watches."""

    num_graphs: int = 0
    last: Work | None = None  # of the step that was launched last; None: it had no graph

    @contextmanager
    def watched(self) -> Iterator[Replays]:
        """In here runners are built of which the graphs are seen."""
        real: Callable[[torch.device], Any] = vars(app.model.ways.gpu)["CudaCapture"]

        def capture_on(device: torch.device) -> Callable[[Work], Work]:
            capture = real(device)
            return lambda function: self._noting(capture(function))

        with patch("app.model.ways.gpu.CudaCapture", capture_on):
            yield self

    def check(self, config: EngineConfig, runner: ModelRunner, *, times: int = 1) -> None:
        """Raises BenchmarkError if steps run eagerly, slower: plausible figures of something else.

        times: that the runner has captured its steps.
        """
        limits = config.scheduler
        mixed = mixed_sizes(max_rows=limits.max_running, max_tokens=limits.max_step_tokens)
        expected = times * (1 + runner.adapts) * (len(graph_sizes(limits.max_running)) + len(mixed))
        if self.num_graphs < expected:
            raise BenchmarkError(
                f"{self.num_graphs} of {expected} CUDA graphs were captured: other steps run eagerly, slower; the "
                f"warnings above say why"
            )

    def _noting(self, replay: Work) -> Work:
        self.num_graphs += 1

        def noted() -> torch.Tensor:
            self.last = replay
            return replay()

        return noted


class WorkAgain:
    """Stands for `CudaCapture`: like a graph it writes each result to where the first one was."""

    def __init__(self, device: torch.device) -> None:
        """device: is not used."""

    def __call__(self, function: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        output = function()
        return lambda: output.copy_(function())


_UNVERIFIED = {"app.model.ways.loaded_model.LoadedModel.difference_in_steps": lambda *_: None}


@contextmanager
def standing_in(is_so: bool = True, *, verifies: bool = False) -> Iterator[None]:
    """The engine takes the CPU for a GPU: where it would choose Triton's kernels and graphs, it does.

    verifies: the steps of each model, too; they are many, and the interpreter is slow.
    """
    with ExitStack() as patches:
        if not is_so:
            yield
            return
        for name, replacement in {
            "app.model.cuda.attention.TritonAttention.fits": staticmethod(lambda device: True),
            "app.model.ways.gpu.CudaCapture": WorkAgain,
            "app.model.verification.NUM_TOKENS": 4,
            "torch.cuda.synchronize": lambda device=None: None,
            **({} if verifies else _UNVERIFIED),
        }.items():
            patches.enter_context(patch(name, replacement))
        yield
