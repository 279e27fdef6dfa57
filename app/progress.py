"""The progress of a model that starts, for a person who waits.

A process logs each step of its start. The launcher names a folder in `CAROUSEL_PROGRESS_FOLDER`; each process that
starts a model has a file in that folder, with the name of the model and the present step.
"""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.disk import replaced

logger = logging.getLogger(__name__)

FOLDER = "CAROUSEL_PROGRESS_FOLDER"  # an environment variable
_name: str | None = None  # of the model that this process starts
_logged = ""


def begin(name: str) -> None:
    """This process begins to start the model of this name. Without this call, `tell` does nothing."""
    global _name
    _name = name
    if folder := os.environ.get(FOLDER):
        told(Path(folder))


def tell(what: str, *, so_far: str = "") -> None:
    """The next step begins.

    what: the step in a few words, such as "loading the weights". so_far: the part of the step that is done.
    """
    global _logged
    if _name is None:
        return
    if what != _logged:
        logger.info("starting %s: %s", _name, what)
        _logged = what
    if folder := os.environ.get(FOLDER):
        # The model starts without a file too.
        with suppress(OSError), replaced(Path(folder) / str(os.getpid()), survives_machine=False) as file:
            file.write_text(f"{_name}\n{what}{so_far}", encoding="utf-8")


def told(folder: Path) -> dict[str, list[str]]:
    """The present steps of the live processes of this machine, by the name of their model.

    The files of processes that have ended are removed.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("[0-9]*")):
        try:
            os.kill(int(path.name), 0)
            name, _, what = path.read_text(encoding="utf-8").partition("\n")
            by_name[name].append(what)
        except OSError:
            path.unlink(missing_ok=True)
    return dict(by_name)


def download_bar() -> type[Any]:
    """A class of tqdm, for downloads that take one. Its bars print nothing, and tell the part that is downloaded."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class DownloadBar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"file": io.StringIO(), "mininterval": float("inf")})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                tell(f"downloading {self.total / 1e6:,.0f} MB", so_far=f", {self.n / self.total:.0%}")
            return shown

    return DownloadBar
