"""A rank that computes nothing: python -m tests.model.parallel.fake_rank SOCKET PARENT HOW"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import torch

from app.child_process import child_command, child_environment, die_with
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


def start_child(module: str, argument: str, descriptor: int) -> subprocess.Popen[bytes]:
    command = child_command(module, str(descriptor), str(os.getpid()), argument)
    return subprocess.Popen(command, env=child_environment(), pass_fds=[descriptor])


def joined(descriptor: int, parent: int, *, ends: bool = False) -> tuple[Channel, RankGroup]:
    """What a rank has once all have come. ends: it does so before that."""
    die_with(parent)
    channel = Channel(socket.socket(fileno=descriptor))
    settings = settings_of(channel.receive()[1])
    if ends:
        sys.exit(1)
    channel.send(Kind.SYNC)
    group = RankGroup(
        settings["rank"], settings["size"], store=Path(settings["store"]), device=torch.device("cpu"), timeout_s=60
    )
    return channel, group


def main(descriptor: int, parent: int, how: str) -> None:
    torch.set_num_threads(1)
    channel, group = joined(descriptor, parent, ends=how == "exit")
    if how == "refuse":
        channel.send_error(InvalidSetup("the memory of rank 1 is too small"))
        return
    if how == "stop-at-load":
        os.kill(os.getpid(), signal.SIGSTOP)
    follow(channel, ExchangingFollower(group.size - 1 if how == "stop-last" else None), group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)
