"""Shows a model's startup progress to a person who is waiting.

A process that starts a model logs each step. The launcher sets `CAROUSEL_PROGRESS_FOLDER` to a folder, in which each of
these processes writes the model's name and the current step to a file.
"""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.disk import replaced

logger = logging.getLogger(__name__)

FOLDER = "CAROUSEL_PROGRESS_FOLDER"  # name of the environment variable
JOINING = "joining the service"  # the last step
_name: str | None = None  # name of the model that this process is starting
_step = ""


def begin(name: str) -> None:
    """Record that this process is starting the named model. Until this call, `report_step` does nothing."""
    global _name
    _name = name
    if folder := os.environ.get(FOLDER):
        for ended in (path for path in Path(folder).glob("[0-9]*") if not _is_alive(path)):
            ended.unlink(missing_ok=True)


def report_step(step: str, *, so_far: str = "") -> None:
    """Report that a step begins, or how much of the current step is done.

    `step` is a short phrase such as "loading the weights". `so_far` is appended to it, such as ", 40%".
    """
    global _step
    if _name is None:
        return
    if step != _step:
        logger.info("starting %s: %s", _name, step)
        _step = step
    if folder := os.environ.get(FOLDER):
        # A failed write must not stop the model's start.
        with suppress(OSError), replaced(Path(folder) / str(os.getpid()), survives_machine=False) as file:
            file.write_text(f"{_name}\n{step}{so_far}", encoding="utf-8")


@contextmanager
def step_within(step: str) -> Iterator[None]:
    """Report a step for the duration of the `with` block, and then the previous step again."""
    before = _step
    report_step(step)
    yield
    report_step(before)


def reported_steps(folder: Path) -> dict[str, list[str]]:
    """Return the current steps of all live processes on this machine, by model name."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in filter(_is_alive, sorted(folder.glob("[0-9]*"))):
        with suppress(OSError):  # `begin` in another process may have removed the file
            name, _, step = path.read_text(encoding="utf-8").partition("\n")
            by_name[name].append(step)
    return dict(by_name)


def _is_alive(path: Path) -> bool:
    """Return whether the process that wrote a progress file is still running."""
    try:
        os.kill(int(path.name), 0)
    except PermissionError:  # the process belongs to another user
        return True
    except OSError:
        return False
    return True


def download_bar() -> type[Any]:
    """Return a tqdm class for download functions. Instead of printing, its bars call `report_step`."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class DownloadBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            ours = {"disable": False, "file": io.StringIO(), "mininterval": float("inf")}
            super().__init__(*arguments, **options | ours)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                report_step(f"downloading {self.total / 1e6:,.0f} MB", so_far=f", {self.n / self.total:.0%}")
            return shown

    return DownloadBar
