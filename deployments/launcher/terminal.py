"""Status lines that are updated in place at the end of a terminal.

Uses only the standard library, because `make` imports this module before packages are installed.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Mapping

_REMINDER_S = 15.0
_UP_AND_CLEAR = "\x1b[A\x1b[2K"


def printable(text: str, *, may_have: str = "") -> str:
    """Remove control characters, except those in `may_have`, because they could manipulate the terminal."""
    return "".join(each for each in text if each.isprintable() or each in may_have)


class StatusLines:
    """Shows several states, one per line. If the output is not a terminal, each change prints a line."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._began = self._printed_at = time.monotonic()
        self._since: dict[str, tuple[str, float]] = {}  # each state without its digits, and the time when it began
        self._num_shown = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was created."""
        return time.monotonic() - self._began

    def show(self, now: Mapping[str, str], *, done: str = "") -> None:
        """Show the current states by name. Seconds are not shown for the state `done`.

        If the output is not a terminal, no line is printed if only numbers change, for example during a download.
        """
        at, changed = time.monotonic(), []
        for name, what in now.items():
            kind = re.sub(r"\d+", "", what)
            if self._since.get(name, ("",))[0] != kind:
                self._since[name] = kind, at
                changed.append(name)
        if self._is_terminal:
            lines = [self._line(name, what, None if what == done else at) for name, what in now.items()]
            sys.stdout.write(_UP_AND_CLEAR * self._num_shown + "".join(f"{line}\n" for line in lines))
            self._num_shown = len(lines)
        else:
            if not changed and at > self._printed_at + _REMINDER_S:
                changed = [name for name, what in now.items() if what != done]
            for name in changed:
                print(printable(f"[{at - self._began:3.0f} s] {name}: {now[name]}", may_have="\n"))
                self._printed_at = at
        sys.stdout.flush()

    def _line(self, name: str, what: str, at: float | None) -> str:
        """Return a line that fits the terminal's width, without control characters."""
        seconds = "" if at is None else f", {at - self._since[name][1]:.0f} s"
        text = printable(f"  {name}: {what}{seconds}")
        width = shutil.get_terminal_size().columns - 1
        return text if len(text) <= width else f"{text[: width - 1]}…"
