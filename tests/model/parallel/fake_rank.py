"""A rank that computes nothing: python -m tests.model.parallel.fake_rank SOCKET PARENT HOW"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch

from app.engine.batch import Batch
from app.errors import InvalidSetup
from app.model.parallel.channel import Channel, Kind, settings_of
from app.model.parallel.follower import die_with, follow
from app.model.parallel.group import RankGroup


class ExchangingFollower:
    """In each step the ranks exchange a number."""

    def prepare(self) -> None:
        pass

    def follow(self, _batch: Batch, group: RankGroup) -> None:
        group.all_reduce(torch.ones(4))


class IdleFollower(ExchangingFollower):
    """A model of nothing."""

    def follow(self, _batch: Batch, group: RankGroup) -> None:
        pass


def main(descriptor: int, parent: int, how: str) -> None:
    die_with(parent)
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=descriptor))
    settings = settings_of(channel.receive()[1])
    if how == "exit":
        return
    channel.send(Kind.SYNC)
    group = RankGroup(
        settings["rank"], settings["size"], store=Path(settings["store"]), device=torch.device("cpu"), timeout_s=60
    )
    if how == "refuse":
        channel.send_error(InvalidSetup("the memory of rank 1 is too small"))
        return
    follow(channel, IdleFollower() if how == "idle" else ExchangingFollower(), group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    os._exit(0)
