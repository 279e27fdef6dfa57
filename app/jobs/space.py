"""The limits of stored bytes: each owner's share of a pool, and the reserve of the disk that stays free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from app.fair import SharedPool

# The database, logs and other programs need room when batches have used their room. A small disk reserves the share.
RESERVE_BYTES = 512 * 1024 * 1024
RESERVE_SHARE = 0.05
RESERVE_OF_WORK = 0.5  # the part of the reserve that results and answers in progress leave free
MIN_CHARGED_BYTES = 4096  # each file counts at least this much: it takes a block of the disk and a row of the catalog


def room_left(total: int, used: Mapping[str, int], owner: str) -> int:
    """Return how much an owner may still take of a pool; negative if the owner has too much.

    The owner "", which stands for all owners if they are not distinguished, may take all that is free.
    """
    pool = SharedPool(total, used)
    return pool.room_left(owner) if owner else pool.free


def shortage_of_share(total: int, used: Mapping[str, int], owner: str, num_bytes: int = 0) -> str | None:
    """Return why an owner may not store `num_bytes` more bytes, or None if the owner may."""
    if num_bytes <= room_left(total, used, owner):
        return None
    own, free = used.get(owner, 0), total - sum(used.values())
    rule = "; a key may store as much as it leaves free" if owner else ""
    return (
        f"files, responses and batches have {own:,} bytes, and {num_bytes:,} more are wanted; this server stores "
        f"{total:,}, and {free:,} of these are free{rule}: delete files first"
    )


def shortage_of_disk(folder: Path, num_bytes: int = 0, *, share_of_reserve: float = 1.0) -> str | None:
    """Return why `num_bytes` more bytes must not be written to the disk of a folder, or None if they may. Blocks.

    Work in progress may use a part of the reserve, so that the work can end when no new work may begin.
    Raises OSError.
    """
    disk = os.statvfs(folder)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    reserve = int(min(RESERVE_BYTES, size * RESERVE_SHARE) * share_of_reserve)
    if free - num_bytes >= reserve:
        return None
    return (
        f"the disk of batches.path has {free:,} bytes free; {num_bytes:,} are wanted, and {reserve:,} have to stay free"
    )
