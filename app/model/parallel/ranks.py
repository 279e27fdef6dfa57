"""Rank 0's side: the processes of the other ranks, the steps that they get, and a watch over both.

A step's exchanges hang where a rank has died or hangs, and then no rank can compute another step. So the first error of
a step or of a rank ends them all, and the step raises DeviceLost: the engine ends, its streams go on elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.config import GIB
from app.engine.batch import DeviceLost, StepBatch
from app.errors import CarouselError, EngineStopped, Failure, InvalidSetup, described
from app.model.adapters import AdapterWeights, part_of_rank, save_part
from app.model.crash_notes import close_note
from app.model.parallel.channel import Channel, Kind
from app.model.parallel.group import ExchangeCounts, RankGroup
from app.model.parallel.split_plan import check_divisible
from app.model.parallel.steps import StepWriter

logger = logging.getLogger(__name__)

# From the first of the ranks that come to the last: torch is loaded by then.
MEET_TIMEOUT_S = 60.0
# To load a model, and to capture its steps: weights have to be read and kernels compiled.
START_TIMEOUT_S = 1800.0
# Of killed ranks: one that hangs in a driver does not end.
END_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class VisibleCard:
    """One GPU."""

    name: str
    num_bytes: int


def cards() -> list[VisibleCard]:
    """Those that this process sees."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [VisibleCard(each.name, each.total_memory) for each in found]


def check_cards(found: Sequence[VisibleCard], size: int) -> None:
    """Raises InvalidSetup, with the numbers, if a model cannot be divided among `size` of these."""
    if len(found) < size:
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size}, but this process sees {len(found)} GPUs; lower it, or reserve more"
        )
    kinds = Counter(f"{card.name} with {card.num_bytes / GIB:.0f} GiB" for card in found[:size])
    if len(kinds) > 1:
        named = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size} for {named}; the ranks of a replica need cards of one kind. Reserve "
            f"those of one kind (CUDA_VISIBLE_DEVICES, or Ray's accelerator_type)"
        )


def check_heads(described: Mapping[str, Any], size: int) -> None:
    """Raises InvalidSetup, with the numbers, if `size` ranks cannot share the attention of the model of a config.json.

    Before any process is started; what else a rank cannot have a part of is found when it loads the model.
    """
    heads = (described.get("text_config") or described).get("num_attention_heads")
    check_divisible({"num_attention_heads": heads}, size, of="the model")


@dataclass(frozen=True, slots=True)
class _Work:
    """What this rank does while it may wait for others."""

    name: str
    limit_s: float  # then it counts as hung
    began_at: float  # by time.monotonic


class Ranks:
    """The ranks beside this one, which is rank 0. Steps are sent by one thread, adapters by another."""

    def __init__(
        self,
        *,
        size: int,
        device: torch.device,
        settings: Mapping[str, Any],
        start: Callable[[int], subprocess.Popen[bytes]],
        step_timeout_s: float,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start the other ranks and wait until all have come.

        start: starts the process of another rank, which inherits the socket of this number and reads the settings
        there, as JSON, with its rank, the size, and the store and the timeout of the group; it answers with a SYNC.
        start_timeout_s: of each of their start, the load and the capture.

        Raises:
            CarouselError: what a rank has ended with, or which one hangs.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="carousel-ranks-"))
        store = self._folder / "store"
        self._counts = ExchangeCounts(store, size)
        self._writer = StepWriter()
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._work: _Work | None = None
        self._awaited: int | None = None  # the rank for the answer of which this one waits
        self._loss: str | None = None
        self._is_closing = False
        self._lock = threading.Lock()  # held while one thread ends the ranks
        self._answering = threading.Lock()  # held by the thread that waits for answers
        self._size = size
        self._channels: list[Channel] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._wake, self._waker = socket.socketpair()
        started = threading.Event()
        self._watching = threading.Thread(
            target=self._watch, args=(start, size, started), name="ranks", daemon=True
        )  # fmt: skip
        self._watching.start()
        started.wait()
        # Of exchanges, of the timeout above: the watch ends what hangs, and says what it was.
        exchanges_wait = 2
        with self._starting("the start of the ranks"):
            if len(self.processes) < size - 1:
                raise Failure("a process for another rank could not be started; the log says more")
            own = {**settings, "size": size, "store": str(store), "timeout_s": exchanges_wait * start_timeout_s}
            for rank, channel in enumerate(self._channels, start=1):
                channel.send(Kind.SETTINGS, json.dumps({**own, "rank": rank}).encode())
            self._receive_all()
            self.group = RankGroup(0, size, store=store, device=device, timeout_s=MEET_TIMEOUT_S)
            self.group.set_timeout(exchanges_wait * start_timeout_s)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around what all ranks do before the first step, but for `preparing`.

        Raises the error of the rank that failed first, where that is known, or says which one hangs.
        """
        with self._starting("loading"):
            yield
            self.wait()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Have the other ranks prepare for their first step; inside, this one does. Raises as `loading` does."""
        with self._starting("preparing for the first step"):
            for channel in self._channels:
                channel.send(Kind.PREPARE)
            yield
            self.wait()

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """Have the other ranks compute a step; inside, this one does. Raises DeviceLost if any of them fails."""
        message = self._writer.message(batch)
        with self.watched():
            try:
                for channel in self._channels:
                    channel.send(Kind.STEP, message)
                yield
            except Exception as error:  # the others may be in the middle of an exchange that this rank does not come to
                self._end(f"a step failed: {described(error)}")
                raise

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Returns once every other rank has its part of an adapter in this slot. Steps go on meanwhile.

        Raises Failure: its parts cannot be written, or a rank could not read one. EngineStopped: a rank has ended.
        """
        found: list[CarouselError] = []
        paths = [self._folder / f"adapter-{rank}" for rank in range(1, self._size)]
        with self._answering:
            try:
                for rank, path in enumerate(paths, start=1):
                    save_part(path, part_of_rank(weights, rank, self._size))
            except Exception as error:
                raise Failure(f"an adapter's parts cannot be written: {described(error)}") from error
            try:
                for path, channel in zip(paths, self._channels, strict=True):
                    channel.send(Kind.ADAPTER, json.dumps([slot, str(path)]).encode())
                for channel in self._channels:
                    try:
                        channel.receive()
                    except CarouselError as error:
                        found.append(error)
            except (EOFError, OSError) as error:
                raise EngineStopped(f"a rank has ended: {self._loss or described(error)}") from error
        if found:
            raise found[0]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what is part of a step and may wait for the other ranks.

        Raises DeviceLost if one has failed, or it takes too long.
        """
        # Of the timeout of a step. At the first a hanging step is ended, at the second the process, if that did not
        # help: all within the timeout, for the watch looks eight times in it.
        hangs_after = 0.75
        try:
            with self._bounded("a step", hangs_after * self._step_timeout_s):
                yield
        except Exception as error:
            if self._loss is not None:
                raise DeviceLost(self._loss) from error
            raise
        self.check()

    @contextmanager
    def _bounded(self, name: str, limit_s: float) -> Iterator[None]:
        """Around work; where it takes longer, all ranks are ended. Within other work that one's limit holds."""
        outer = self._work
        self._work = outer or _Work(name, limit_s, time.monotonic())
        try:
            yield
        finally:
            self._work = outer

    def check(self) -> None:
        """Raises DeviceLost if the ranks have ended."""
        if self._loss is not None:
            raise DeviceLost(self._loss)

    def wait(self) -> None:
        """Wait until every rank has done what it was sent. Raises the error of one that failed, or EOFError."""
        with self._answering:
            for channel in self._channels:
                channel.send(Kind.SYNC)
            self._receive_all()

    def _receive_all(self) -> None:
        for rank, channel in enumerate(self._channels, start=1):
            self._awaited = rank
            channel.receive()
        self._awaited = None

    def close(self) -> None:
        """End the other ranks."""
        self._is_closing = True
        self._end("the engine is closed")
        with suppress(OSError):
            self._waker.send(b"x")
        self._watching.join()
        self._wake.close()
        self._waker.close()
        for channel in self._channels:
            channel.close()

    # ------------------------------------------------------------------ ending

    @contextmanager
    def _starting(self, name: str) -> Iterator[None]:
        """Around what must not fail on any rank: all end with it."""
        try:
            with self._bounded(name, self._start_timeout_s):
                yield
            self.check()
        except BaseException as error:
            is_own = isinstance(error, CarouselError) or not isinstance(error, Exception)
            told = None if is_own else self._told()
            reason = self._loss or described(error)
            self.close()
            if is_own:
                raise
            raise told or Failure(f"the ranks cannot start: {reason}") from error

    def _missing(self) -> str | None:
        """The ranks for which the others wait, in words, where that is known."""
        ranks = [self._awaited] if self._awaited is not None else self._counts.missing()
        return " and ".join(f"rank {rank}" for rank in ranks) or None

    def _told(self) -> CarouselError | None:
        """The error that another rank has ended with, if it has said one."""
        for channel, process in zip(self._channels, self.processes, strict=True):
            with suppress(EOFError, OSError):
                try:
                    process.wait(timeout=1.0)  # what it says, it says before its end
                    while True:
                        channel.receive()
                except subprocess.TimeoutExpired:
                    continue
                except CarouselError as error:
                    return error
        return None

    def _end(self, reason: str) -> None:
        """Kill the other ranks, which ends what this one waits for. Any thread may call it, more than once."""
        with self._lock:
            if self._loss is not None:
                return
            self._loss = reason
            close_note()  # NCCL may abort this process when it finds that the others have ended
            if not self._is_closing:
                logger.error("all ranks are ended: %s", reason)
            for process in self.processes:
                process.kill()
            deadline = time.monotonic() + END_TIMEOUT_S
            for process in self.processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
            with suppress(Exception):  # a group that is of no use; on GPUs this ends kernels that wait
                self.group.abort()
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ the thread that watches

    def _watch(self, start: Callable[[int], subprocess.Popen[bytes]], size: int, started: threading.Event) -> None:
        """Start the other ranks and stay: the kernel kills them when the thread ends that started them."""
        with ExitStack() as files:
            try:
                for _ in range(1, size):
                    own, others = socket.socketpair()
                    with others:
                        self.processes.append(start(others.fileno()))
                    self._channels.append(Channel(own))
                ends = [os.pidfd_open(process.pid) for process in self.processes]
            except Exception as error:
                logger.error("a rank cannot be started: %s", described(error))
                return
            finally:
                started.set()
            for end in ends:
                files.callback(os.close, end)
            self._look(ends)

    def _look(self, ends: Sequence[int]) -> None:
        timeout_s = self._step_timeout_s
        waiting = select.poll()
        for end in (*ends, self._wake.fileno()):
            waiting.register(end, select.POLLIN)
        num_looks = 8
        while not self._is_closing:
            ready = dict(waiting.poll(1000 * timeout_s / num_looks))
            if self._is_closing:
                return
            dead = [rank for rank, end in enumerate(ends, start=1) if end in ready]
            work = self._work
            if dead:
                self._lose(f"rank {dead[0]} has ended")
                return
            if work is not None and time.monotonic() - work.began_at > work.limit_s:
                self._lose(f"{work.name} has taken more than {work.limit_s:g} s; {self._missing() or 'a rank'} hangs")
                return

    def _lose(self, reason: str) -> None:
        self._end(reason)
        if self._work is None:
            return
        exits_after = 0.125
        deadline = time.monotonic() + exits_after * self._step_timeout_s
        while self._work is not None:
            if time.monotonic() > deadline:
                logger.critical("this rank does not end what it does with the others; the process ends")
                os._exit(70)
            time.sleep(0.01)
