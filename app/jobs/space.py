"""Limits for stored bytes: each owner's share of the total, and a reserve of the disk that stays free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from app.fair import SharedPool

# Batches leave the smaller of these two amounts free on the disk, for the database, logs and other programs.
RESERVE_BYTES = 512 * 1024 * 1024
RESERVE_SHARE = 0.05
RESERVE_OF_WORK = 0.5  # fraction of the reserve that results and answers in progress leave free
MIN_CHARGED_BYTES = 4096  # each file counts as at least this much, for its disk block and its row in the catalog


def room_left(total: int, used: Mapping[str, int], owner: str) -> int:
    """Return how much of the total an owner may still use; negative if the owner exceeds its share.

    The owner "", which stands for all owners if they are not distinguished, may use everything that is free.
    """
    pool = SharedPool(total, used)
    return pool.room_left(owner) if owner else pool.free


def shortage_of_share(total: int, used: Mapping[str, int], owner: str, num_bytes: int = 0) -> str | None:
    """Return the reason why an owner may not store `num_bytes` more bytes, or None if it may."""
    if num_bytes <= room_left(total, used, owner):
        return None
    own, free = used.get(owner, 0), total - sum(used.values())
    rule = "; a key must leave as much free as it stores" if owner else ""
    return (
        f"files, responses and batches use {own:,} bytes, and {num_bytes:,} more are needed; this server stores up to "
        f"{total:,}, of which {free:,} are free{rule}. Delete files first"
    )


def shortage_of_disk(folder: Path, num_bytes: int = 0, *, share_of_reserve: float = 1.0) -> str | None:
    """Return the reason why `num_bytes` more bytes must not be written to a folder's disk, or None if they may.

    Work in progress passes a lower `share_of_reserve`, so it can finish while no new work starts. Raises OSError.
    """
    disk = os.statvfs(folder)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    reserve = int(min(RESERVE_BYTES, size * RESERVE_SHARE) * share_of_reserve)
    if free - num_bytes >= reserve:
        return None
    return f"the disk of batches.path has {free:,} bytes free; {num_bytes:,} are needed, and {reserve:,} must stay free"
