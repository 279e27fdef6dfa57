"""Time by part, and the probes that a profile puts into an engine and takes out again."""

from __future__ import annotations

import torch

from app.engine.engine import Engine
from app.engine.scheduler import Scheduler
from app.model import runner
from benchmarks.engine.probes import FORWARD, HEAD, LINEAR, RootModule, Stopwatch, probes


def test_an_inner_part_is_not_counted_for_the_outer_one() -> None:
    times = iter([0.0, 1.0, 5.0, 7.0])
    stopwatch = Stopwatch(now=lambda: next(times))
    inner = stopwatch.timed("inner", lambda: None)
    stopwatch.timed("outer", inner)()
    assert stopwatch.seconds == {"inner": 4.0, "outer": 3.0}


class OwnLayer(torch.nn.Module):
    """A linear layer that is none of torch's, as an engine may put one in its place."""

    in_features = out_features = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.eye(4)


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = OwnLayer()
        self.head = torch.nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.body(x)
        logits: torch.Tensor = self.head(hidden)
        return logits


def test_probes_tell_the_layers_apart_and_leave_nothing_behind() -> None:
    module, root, stopwatch = TwoLayers(), RootModule(), Stopwatch()
    with root.watch():
        module(torch.zeros(1, 4))
    assert root.module is module
    originals = (Engine.step, Scheduler.schedule, runner.sample)
    with probes(stopwatch, None, root.module, vocab_size=9) as missing:
        module(torch.zeros(1, 4))
    assert not missing
    assert set(stopwatch.seconds) == {LINEAR, HEAD, FORWARD}
    seen = dict(stopwatch.seconds)
    module(torch.zeros(1, 4))
    assert stopwatch.seconds == seen
    assert (Engine.step, Scheduler.schedule, runner.sample) == originals


class OwnClock:
    """A forward pass into which no hook looks."""

    def __init__(self) -> None:
        self.spent = {"linear": 0.0, "head": 0.0, "attention": 0.0, "rest": 0.0}

    def predict(self) -> None:
        self.spent["linear"] += 0.25

    def seconds(self) -> dict[str, float]:
        return dict(self.spent)


def test_a_forward_pass_that_counts_by_itself_is_believed() -> None:
    clock = iter((10.0, 11.0))
    forward, stopwatch = OwnClock(), Stopwatch(now=lambda: next(clock))
    with probes(stopwatch, forward, None, vocab_size=9) as missing:
        forward.predict()
    assert not missing
    assert stopwatch.seconds[LINEAR] == 0.25
    assert stopwatch.seconds[FORWARD] == 0.75
    assert "predict" not in vars(forward)
