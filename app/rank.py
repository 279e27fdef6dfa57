"""Runs any rank but rank 0 (`python -m app.rank SOCKET PARENT`): loads its part of the model and follows rank 0."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from app.child_process import die_with
from app.model.parallel.channel import Channel, Kind, settings_of
from app.model.parallel.steps import StepReader

if TYPE_CHECKING:
    from app.model.parallel.group import RankGroup
    from app.model.runner import LeadingRunner

logger = logging.getLogger(__name__)


def main(descriptor: int, parent: int) -> int:
    """Load this rank's part of the model, follow rank 0, and return the exit status. Errors are sent to rank 0."""
    die_with(parent)  # before torch is imported, which takes seconds

    from app.errors import CarouselError, Failure, described, traceback_of

    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _load_and_follow(channel)
    except CarouselError as error:
        channel.send_error(error)
    except Exception as error:
        logger.error("a rank failed: %s", traceback_of(error))
        channel.send_error(Failure(f"a rank failed: {described(error)}"))
    else:
        return 0
    return 1


def _load_and_follow(channel: Channel) -> None:
    import torch

    from app.config import EngineConfig
    from app.model.device import device_of
    from app.model.loader import load_runner
    from app.model.parallel.group import RankGroup
    from app.model.parallel.ranks import MEET_TIMEOUT_S

    _, content = channel.receive()
    settings = settings_of(content)
    config, rank = EngineConfig.model_validate(settings["config"]), settings["rank"]
    device = device_of(config.model)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    channel.send(Kind.SYNC)
    group = RankGroup(rank, settings["size"], store=Path(settings["store"]), device=device, timeout_s=MEET_TIMEOUT_S)
    group.set_timeout(settings["timeout_s"])
    loaded = load_runner(config, group=group)
    follow(channel, loaded.runner, group)


def follow(channel: Channel, runner: LeadingRunner, group: RankGroup) -> None:
    """Run rank 0's steps until it ends. Raises the error of a failed step, because the ranks cannot continue then."""
    reader = StepReader()
    runner.join(group)
    with ThreadPoolExecutor(1) as copy_stream:
        while True:
            try:
                kind, content = channel.receive()
            except EOFError:
                return
            if kind is Kind.STEP:
                runner.follow(reader.batch(content))
            elif kind is Kind.PREPARE:
                runner.prepare()
            elif kind is Kind.ADAPTER:
                copy_stream.submit(_load_adapter, channel, runner, *json.loads(content))
            else:
                assert kind is Kind.SYNC, f"unexpected message from rank 0: {kind.name}"
                channel.send(Kind.SYNC)


def _load_adapter(channel: Channel, runner: LeadingRunner, slot: int, path: str) -> None:
    """Load an adapter. A failure is reported to rank 0, but does not end this rank."""
    from app.errors import Failure, described, traceback_of
    from app.model.adapters import read_part

    try:
        runner.follow_adapter(slot, read_part(Path(path)))
        Path(path).unlink()
    except Exception as error:
        logger.error("an adapter could not be loaded: %s", traceback_of(error))
        channel.send_error(Failure(f"a rank cannot load the adapter: {described(error)}"))
    else:
        channel.send(Kind.SYNC)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    status = main(int(sys.argv[1]), int(sys.argv[2]))
    logging.shutdown()
    os._exit(status)  # does not join threads, which may still be waiting for other ranks
