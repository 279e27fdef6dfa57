"""Row R15: prefixes come from a folder of `cache.tiers` or from another replica, while one of the two has a fault."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.chaos.faults import LASTS_S, Choose, Fault, Mend, Strike, kill, kill_replicas, stop
from benchmarks.chaos.stage import Size, Stage, under_traffic
from benchmarks.chaos.traffic import Asked, mixed
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.disk import fill, small_disk
from benchmarks.harness.processes import connections
from benchmarks.harness.service import scraped, total

_DISK_MIB = 512
_NUM_BLOCKS = 1024  # blocks of a replica: too few for the prompts of its streams
_PROMPT_TOKENS = (560, 760)  # prompts seen once are stored from 512 tokens on
_MAX_TOKENS = (60, 160)
_FLIPPED_BITS = 1000
_TRANSFER_WITHIN_S = 60.0
_STANDS_STILL_S = 1.0
_TOKENS_READ = "carousel_tier_tokens_total"


async def break_tier(size: Size) -> list[dict[str, Any]]:
    """R15: faults of a folder of prefixes that replicas share: kill -9, a deleted, damaged, full or hanging folder.
    Without a folder, replicas fetch prefixes from each other: kill -9 of the sender or receiver in a transfer."""
    with small_disk(_DISK_MIB) as disk:
        folder = disk / "kv"
        faults = {
            "kill -9 one of 3 replicas": kill_replicas(1),
            "the folder is deleted": _on(folder, _delete),
            f"{_FLIPPED_BITS} bits are flipped": _on(folder, _flip),
            f"the disk is full for {LASTS_S:g} s": _on(folder, _fill),
            f"reads hang for {LASTS_S:g} s": _on(folder, _hang),
        }
        requests = mixed(size.streams, max_tokens=_MAX_TOKENS, prompt_tokens=_PROMPT_TOKENS)
        compared = {"nothing is fetched, for comparison: kill -9 one of 3 replicas": kill_replicas(1)}
        peers = {
            f"kill -9 the replica that {what} blocks of another": partial(_in_transfer, end)
            for end, what in enumerate(("sends", "receives"))
        }
        return [
            *await _under(compared, requests, size, fetch_prefixes=False),
            *await _under(peers, requests, size, dispatch="round_robin"),
            *await _under(faults, requests, size, cache={"tiers": [{"path": str(folder), "max_gib": 0.25}]}),
        ]


async def _under(
    faults: Mapping[str, Choose], requests: Sequence[Asked], size: Size, *,
    cache: Mapping[str, Any] = MappingProxyType({}), **settings: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    cache = {"num_blocks": _NUM_BLOCKS, "tiers": [], **cache}
    rows = []
    async with under_traffic(size, requests=requests, weights=True, cache=cache, **settings) as (running, traffic):
        for text, choose in faults.items():
            fault = Fault(row="R15", text=text, choose=choose, source=text, after_s=LASTS_S)
            read_before = total(scraped(running.target), _TOKENS_READ)
            rows.append(await fault.figures(running, replace(traffic, answers=[]), size))
            # The counter of a replaced replica starts at 0.
            rows[-1]["tokens_read"] = total(scraped(running.target), _TOKENS_READ) - read_before
    return rows


def _in_transfer(end: int, running: Stage, source: random.Random) -> Strike:
    """Return a strike that kills the sender (`end` 0) or the receiver (1) of a prefix during the transfer.

    The sender is stopped for at most a second, until a replica connects. Raises BenchmarkError if no replica connects.
    """
    replicas, deadline_s = running.replicas(), time.perf_counter() + _TRANSFER_WITHIN_S
    while time.perf_counter() < deadline_s:
        sender = source.choice(replicas)
        go_on, until_s = stop(sender), time.perf_counter() + _STANDS_STILL_S
        while time.perf_counter() < until_s:
            for transfer in connections(replicas):
                if transfer[0] == sender:
                    return partial(_kill_and_go_on, transfer[end], go_on)
        go_on()
        time.sleep(_STANDS_STILL_S)
    raise BenchmarkError(f"no replica fetched a prefix from another within {_TRANSFER_WITHIN_S:g} s")


def _kill_and_go_on(victim: int, go_on: Mend) -> None:
    kill([victim])
    with suppress(ProcessLookupError):  # the stopped process was the victim
        go_on()


def _on(folder: Path, strike: Callable[[Path, random.Random], Mend | None]) -> Choose:
    return lambda _running, source: partial(strike, folder, source)


def _delete(folder: Path, _source: random.Random) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """Return the files of blocks. Raises BenchmarkError if there is none, because a fault would then have no effect."""
    found = [each for each in folder.rglob("*") if len(each.name) == 40 and each.is_file()]
    if not found:
        raise BenchmarkError(f"no KV block is stored in {folder}, so the row would be meaningless")
    return found


def _flip(folder: Path, source: random.Random) -> None:
    """Flip bits of random blocks in place."""
    files = _files(folder)
    for _ in range(_FLIPPED_BITS):
        with suppress(FileNotFoundError), source.choice(files).open("r+b", buffering=0) as file:
            at = source.randrange(os.fstat(file.fileno()).st_size)
            (byte,) = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << source.randrange(8)]), at)


def _fill(folder: Path, _source: random.Random) -> Mend:
    filler = folder.parent / "filler"
    fill(filler)
    return filler.unlink


def _hang(folder: Path, _source: random.Random) -> Mend:
    """Replace each block by a named pipe, so that a reader's open blocks until there is a writer."""
    files = _files(folder)
    for path in files:
        with suppress(OSError):
            hidden = path.with_name(".pipe")
            os.mkfifo(hidden)
            hidden.rename(path)
    return partial(_release, files)


def _release(files: Sequence[Path]) -> None:
    """Let each blocked reader find an empty file, and delete the pipes."""
    for path in files:
        with suppress(FileNotFoundError):
            if not stat.S_ISFIFO(path.stat().st_mode):
                continue
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError as error:
                if error.errno != errno.ENXIO:  # no reader waits
                    raise
            path.unlink()
