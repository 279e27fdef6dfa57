"""Time by part, where parts lie inside each other: what an inner part takes is not counted for the outer one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class _Open:
    started_s: float
    inner_s: float = 0.0


@dataclass(slots=True)
class Stopwatch:
    """One thread's time. `synchronize` waits for the device, so that its work counts where it was asked for."""

    synchronize: Callable[[], None] | None = None
    now: Callable[[], float] = time.perf_counter
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[_Open] = field(default_factory=list)

    def enter(self) -> None:
        self._open.append(_Open(self._read()))

    def leave(self, part: str) -> None:
        """End what was entered last, and say what it was."""
        ended = self._open.pop()
        whole_s = self._read() - ended.started_s
        self.seconds[part] += whole_s - ended.inner_s
        if self._open:
            self._open[-1].inner_s += whole_s

    def note(self, part: str, seconds: float) -> None:
        """Count what something inside the open part measured by itself."""
        self.seconds[part] += seconds
        if self._open:
            self._open[-1].inner_s += seconds

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """The same function, counted as `part`."""

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            self.enter()
            try:
                return function(*args, **kwargs)
            finally:
                self.leave(part)

        return run

    def _read(self) -> float:
        if self.synchronize is not None:
            self.synchronize()
        return self.now()
