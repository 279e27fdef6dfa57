"""Rank 0's side of tensor parallelism: starts the other ranks, sends them steps, and watches for ranks that hang.

If a rank dies or hangs, so do the exchanges of its step, and no rank can run another step. The first error of a step
or a rank therefore ends all ranks. The step raises DeviceLost, the engine ends, and other replicas resume its streams.
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

# How long ranks wait for each other to connect, after all have imported torch.
MEET_TIMEOUT_S = 60.0
# The limit for reading weights, and for compiling kernels and capturing steps.
START_TIMEOUT_S = 1800.0
# How long to wait for killed ranks to end. A rank that hangs in a driver does not end at all.
END_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class VisibleCard:
    """The properties of a visible GPU that matter for sharing a model."""

    name: str
    num_bytes: int


def cards() -> list[VisibleCard]:
    """Return all GPUs that are visible to this process."""
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [VisibleCard(each.name, each.total_memory) for each in found]


def check_cards(found: Sequence[VisibleCard], size: int) -> None:
    """Raise InvalidSetup, with the numbers, if these are fewer than `size` GPUs, or GPUs of different kinds."""
    if len(found) < size:
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size}, but this process can use only {len(found)} GPUs; lower it, or "
            f"reserve more"
        )
    kinds = Counter(f"{card.name} with {card.num_bytes / GIB:.0f} GiB" for card in found[:size])
    if len(kinds) > 1:
        named = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size} for {named}; the ranks of a replica need cards of one kind. Reserve "
            f"cards of one kind (CUDA_VISIBLE_DEVICES, or Ray's accelerator_type)"
        )


def check_heads(described: Mapping[str, Any], size: int) -> None:
    """Raise InvalidSetup, with the numbers, if `size` does not divide the attention heads. described: config.json.

    Called before any process is started. The model's other sizes are checked when it is loaded.
    """
    heads = (described.get("text_config") or described).get("num_attention_heads")
    check_divisible({"num_attention_heads": heads}, size, of="the model")


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of this rank that may wait for other ranks, so that the watching thread can tell when it hangs."""

    name: str
    limit_s: float  # longer work counts as hung
    began_at: float  # time.monotonic()


class Ranks:
    """Rank 0's handle on the other ranks. One thread may send steps while another one sends adapters."""

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
        """Start the other ranks. Blocks until all have connected.

        start: starts a rank's process, which must inherit the socket with the given file descriptor. The process reads
            JSON from the socket (`settings` with its rank, and the group's size, store and timeout), and answers with
            a SYNC.
        step_timeout_s, start_timeout_s: the limits for a step, and for each of connecting, loading and capturing.

        Raises the CarouselError with which a rank ended, or one that names a rank that hangs.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="carousel-ranks-"))
        store = self._folder / "store"
        self._counts = ExchangeCounts(store, size)
        self._writer = StepWriter()
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._work: _Work | None = None
        self._awaited: int | None = None  # the rank whose answer rank 0 is waiting for
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
        # Exchanges have twice the timeout, so that the watching thread identifies the rank that hangs before they fail.
        exchanges_wait = 2
        with self._starting("the start of the ranks"):
            if len(self.processes) < size - 1:
                raise Failure("a process for another rank could not be started; see the log")
            own = {**settings, "size": size, "store": str(store), "timeout_s": exchanges_wait * start_timeout_s}
            for rank, channel in enumerate(self._channels, start=1):
                channel.send(Kind.SETTINGS, json.dumps({**own, "rank": rank}).encode())
            self._receive_all()
            self.group = RankGroup(0, size, store=store, device=device, timeout_s=MEET_TIMEOUT_S)
            self.group.set_timeout(exchanges_wait * start_timeout_s)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wrap the loading of rank 0's part. On exit, wait until all ranks have loaded theirs.

        Raises the error that a failed rank has sent, or one that names the rank that hangs. All ranks have then ended.
        """
        with self._starting("loading"):
            yield
            self.wait()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Make the other ranks prepare for their first step while the body prepares rank 0. Raises like `loading`."""
        with self._starting("preparing for the first step"):
            for channel in self._channels:
                channel.send(Kind.PREPARE)
            yield
            self.wait()

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """Make the other ranks run a step while the body runs it on rank 0. Raises DeviceLost if a rank fails."""
        message = self._writer.message(batch)
        with self.watched():
            try:
                for channel in self._channels:
                    channel.send(Kind.STEP, message)
                yield
            except Exception as error:  # other ranks may wait in an exchange that rank 0 will not reach
                self._end(f"a step failed: {described(error)}")
                raise

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Send each other rank its part of an adapter for a slot. Blocks until all have loaded it; steps continue.

        Raises Failure if a part cannot be written, the error of a rank that cannot load its part, or EngineStopped if
        a rank has ended.
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
        """Wrap a part of a step that may wait for other ranks. Raises DeviceLost if a rank fails or hangs."""
        # A fraction of the step's timeout. `_look` checks eight times in a timeout, and `_lose` ends this process after
        # another eighth, so that both take effect before the timeout.
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
        """End all ranks if the body takes longer than the limit. In nested contexts, only the outer limit counts."""
        outer = self._work
        self._work = outer or _Work(name, limit_s, time.monotonic())
        try:
            yield
        finally:
            self._work = outer

    def check(self) -> None:
        """Raise DeviceLost if a failure has ended the ranks."""
        if self._loss is not None:
            raise DeviceLost(self._loss)

    def wait(self) -> None:
        """Block until every rank has processed all messages. Raises the error of a failed rank, or EOFError."""
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
        """End the other ranks and the thread that watches them."""
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
        """Wrap work that must succeed on all ranks. If it fails, all ranks are ended."""
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
        """Name the ranks that other ranks are waiting for, or return None if no rank lags behind."""
        ranks = [self._awaited] if self._awaited is not None else self._counts.missing()
        return " and ".join(f"rank {rank}" for rank in ranks) or None

    def _told(self) -> CarouselError | None:
        """Return the error that another rank sent before it ended, or None."""
        for channel, process in zip(self._channels, self.processes, strict=True):
            with suppress(EOFError, OSError):
                try:
                    process.wait(timeout=1.0)  # a rank sends its error before it ends
                    while True:
                        channel.receive()
                except subprocess.TimeoutExpired:
                    continue
                except CarouselError as error:
                    return error
        return None

    def _end(self, reason: str) -> None:
        """Kill the other ranks, which makes this rank's pending exchanges fail. Thread-safe; later calls do nothing."""
        with self._lock:
            if self._loss is not None:
                return
            self._loss = reason
            close_note()  # NCCL may abort this process as a consequence, which is not a crash to report
            if not self._is_closing:
                logger.error("ending all ranks: %s", reason)
            for process in self.processes:
                process.kill()
            deadline = time.monotonic() + END_TIMEOUT_S
            for process in self.processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.0, deadline - time.monotonic()))
            with suppress(Exception):  # the group may not exist yet; on GPUs, this ends kernels that wait
                self.group.abort()
            shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ the thread that watches

    def _watch(self, start: Callable[[int], subprocess.Popen[bytes]], size: int, started: threading.Event) -> None:
        """Start and watch the ranks. One thread does both, because Linux kills a rank when its starting thread ends."""
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
                logger.critical("this rank is stuck waiting for other ranks; ending this process")
                os._exit(70)
            time.sleep(0.01)
