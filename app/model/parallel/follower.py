"""Another rank's side: computes the steps that rank 0 sends."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING, Protocol

from app.engine.batch import StepBatch
from app.model.parallel.channel import Channel, Kind
from app.model.parallel.steps import StepReader

if TYPE_CHECKING:
    from app.model.parallel.group import RankGroup


class FollowingRunner(Protocol):
    """A model runner with the steps of rank 0."""

    def join(self, group: RankGroup) -> None:
        """Before all else: the ranks with which it computes."""
        ...

    def prepare(self) -> None:
        """See `ModelRunner.prepare`."""
        ...

    def follow(self, batch: StepBatch) -> None:
        """Compute a step's forward pass: this rank's part of it."""
        ...


def follow(channel: Channel, runner: FollowingRunner, group: RankGroup) -> None:
    """Compute until rank 0 ends. Raises what a step raises: the ranks cannot go on after that."""
    reader = StepReader()
    runner.join(group)
    while True:
        try:
            kind, content = channel.receive()
        except EOFError:
            return
        if kind is Kind.STEP:
            runner.follow(reader.batch(content))
        elif kind is Kind.PREPARE:
            runner.prepare()
        else:
            assert kind is Kind.SYNC, f"a rank that runs gets no {kind.name}"
            channel.send(Kind.SYNC)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread ends that started it, even while it is stopped.

    parent: the process of that thread.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("rank 0 has ended already")
