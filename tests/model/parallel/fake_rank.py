"""Ranks forked from the tests, where torch and transformers are imported already, which takes seconds; one of them
computes nothing."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from app.child_process import die_with
from app.engine.batch import StepBatch
from app.errors import InvalidSetup
from app.model.parallel.channel import Channel, Kind, settings_of
from app.model.parallel.group import RankGroup
from app.rank import follow


class ExchangingFollower:
    """Before the first step, and in each, the ranks exchange a number."""

    def __init__(self, stopped: int | None = None) -> None:
        """stopped: the rank that stops before the first step."""
        self._stopped = stopped

    def join(self, group: RankGroup) -> None:
        self._group = group

    def prepare(self) -> None:
        if self._group.rank == self._stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        self._group.minimum(0)

    def follow(self, _batch: StepBatch) -> None:
        self._group.all_reduce(torch.ones(4))


class ForkedRank(subprocess.Popen[bytes]):
    """The process of a rank. It has one thread for torch: those of the pool are not forked."""

    def __init__(self, main: Callable[[int, int], None], descriptor: int) -> None:
        self._main, self._descriptor = main, descriptor
        super().__init__(())

    def _execute_child(self, *_: object) -> None:
        """In place of another program."""
        parent, descriptor = os.getpid(), self._descriptor
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        try:
            os.closerange(3, descriptor)  # among them the other ends of the sockets
            os.closerange(descriptor + 1, 4096)
            gc.freeze()  # the end of a group of the process before would wait for threads that are not forked
            torch.set_num_threads(1)
            self._main(descriptor, parent)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def joined(descriptor: int, parent: int, how: str = "") -> tuple[Channel, RankGroup]:
    """What a rank has once all have come. how: "exit" and "stop-at-start" keep it from that."""
    die_with(parent)
    if how == "stop-at-start":
        os.kill(os.getpid(), signal.SIGSTOP)
    channel = Channel(socket.socket(fileno=descriptor))
    settings = settings_of(channel.receive()[1])
    if how == "exit":
        sys.exit(1)
    channel.send(Kind.SYNC)
    group = RankGroup(
        settings["rank"], settings["size"], store=Path(settings["store"]), device=torch.device("cpu"), timeout_s=60
    )
    return channel, group


def main(how: str, descriptor: int, parent: int) -> None:
    channel, group = joined(descriptor, parent, how)
    if how == "refuse":
        channel.send_error(InvalidSetup("the memory of rank 1 is too small"))
        return
    if how == "stop-at-load":
        os.kill(os.getpid(), signal.SIGSTOP)
    follow(channel, ExchangingFollower(group.size - 1 if how == "stop-last" else None), group)
