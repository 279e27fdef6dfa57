"""The seam to whoever runs jobs on a cluster: bulk runs, found again by an id over crashes of whoever began them."""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import Protocol


class JobState(Enum):
    """What a server says of a job."""

    RUNNING = auto()  # or about to
    ENDED = auto()  # well, badly or stopped: what came of it is in its folder
    UNKNOWN = auto()  # not to this server: never begun, or in a cluster that is gone


class NoJobServer(Exception):
    """It does not answer; it may later."""


class JobServer(Protocol):
    """Runs jobs. Every method raises NoJobServer when it cannot be asked now."""

    async def submit(self, job_id: str, *, model: str, folder: Path) -> None:
        """Begin the bulk run of `folder`: its INPUT to its OUTPUT, on engines of this model.

        It goes on where an earlier one has ended. Nothing when there is a job of this id already.
        """

    async def state(self, job_id: str) -> JobState:
        """What has become of a job."""

    async def stop(self, job_id: str) -> None:
        """Ask it to end; it ends in a moment. Nothing when it has ended, or is not known."""

    async def log(self, job_id: str) -> str:
        """The end of what it has printed."""


INPUT, OUTPUT = "input.jsonl", "out"
