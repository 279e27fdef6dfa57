"""The progress of a model that starts, for a person who waits.

A process logs each step of its start. The launcher names a folder in `CAROUSEL_PROGRESS_FOLDER`; each process that
starts a model has a file in that folder, with the name of the model and the present step.
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

FOLDER = "CAROUSEL_PROGRESS_FOLDER"  # an environment variable
JOINING = "joining the service"  # the last step
_name: str | None = None  # of the model that this process starts
_step = ""


def begin(name: str) -> None:
    """This process begins to start the model of this name. Without this call, `tell` does nothing."""
    global _name
    _name = name
    if folder := os.environ.get(FOLDER):
        for ended in (path for path in Path(folder).glob("[0-9]*") if not _is_alive(path)):
            ended.unlink(missing_ok=True)


def tell(step: str, *, so_far: str = "") -> None:
    """The next step begins.

    step: a few words, such as "loading the weights". so_far: the part of the step that is done.
    """
    global _step
    if _name is None:
        return
    if step != _step:
        logger.info("starting %s: %s", _name, step)
        _step = step
    if folder := os.environ.get(FOLDER):
        # The model starts without a file too.
        with suppress(OSError), replaced(Path(folder) / str(os.getpid()), survives_machine=False) as file:
            file.write_text(f"{_name}\n{step}{so_far}", encoding="utf-8")


@contextmanager
def step_within(step: str) -> Iterator[None]:
    """A step that interrupts another: the one before goes on after the block."""
    before = _step
    tell(step)
    yield
    tell(before)


def told(folder: Path) -> dict[str, list[str]]:
    """The present steps of the live processes of this machine, by the name of their model."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in filter(_is_alive, sorted(folder.glob("[0-9]*"))):
        with suppress(OSError):  # the next process that begins has removed the file
            name, _, step = path.read_text(encoding="utf-8").partition("\n")
            by_name[name].append(step)
    return dict(by_name)


def _is_alive(path: Path) -> bool:
    """Whether the process of a file has not ended."""
    try:
        os.kill(int(path.name), 0)
    except PermissionError:  # it is of another user
        return True
    except OSError:
        return False
    return True


def download_bar() -> type[Any]:
    """A class of tqdm, for downloads that take one. Its bars print nothing, and tell the part that is downloaded."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class DownloadBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            ours = {"disable": False, "file": io.StringIO(), "mininterval": float("inf")}
            super().__init__(*arguments, **options | ours)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                tell(f"downloading {self.total / 1e6:,.0f} MB", so_far=f", {self.n / self.total:.0%}")
            return shown

    return DownloadBar
