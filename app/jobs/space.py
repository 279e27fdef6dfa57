"""What owners may keep, and what stays free: each owner's share of a pool, and the reserve of the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from app.fair import SharedPool

# The database, logs and other programs need room when batches have used theirs. Of a small disk it is a share.
RESERVE_BYTES = 512 * 1024 * 1024
RESERVE_SHARE = 0.05
RESERVE_OF_WORK = 0.5  # the part of the reserve that stays free of results and answers that are being computed
MIN_CHARGED_BYTES = 4096  # of a file: a block of the disk and a row of the catalog


def room_left(total: int, used: Mapping[str, int], owner: str) -> int:
    """What an owner may still take of a pool, below 0 when it has too much.

    It is all that is free where owners are not told apart ("").
    """
    pool = SharedPool(total, used)
    return pool.room_left(owner) if owner else pool.free


def shortage_of_share(total: int, used: Mapping[str, int], owner: str, num_bytes: int = 0) -> str | None:
    """Why an owner may not keep so many bytes more; None when it may."""
    if num_bytes <= room_left(total, used, owner):
        return None
    own, free = used.get(owner, 0), total - sum(used.values())
    rule = "; a key may keep as much as stays free for others" if owner else ""
    return (
        f"files, responses and batches have {own:,} bytes, and {num_bytes:,} more are wanted; this server keeps "
        f"{total:,}, of which {free:,} are free{rule}: delete files first"
    )


def shortage_of_disk(folder: Path, num_bytes: int = 0, *, share_of_reserve: float = 1.0) -> str | None:
    """Why so many bytes more must not be written to the disk of this folder; None when they may. Blocks.

    Work that is under way may use a part of the reserve, so that it comes to its end where nothing new may begin.
    Raises OSError.
    """
    disk = os.statvfs(folder)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    reserve = int(min(RESERVE_BYTES, size * RESERVE_SHARE) * share_of_reserve)
    if free - num_bytes >= reserve:
        return None
    return (
        f"the disk of batches.path has {free:,} bytes free, of which {num_bytes:,} are wanted and {reserve:,} stay free"
    )
