"""Lines that change in place, in a real pseudo-terminal, and what a file or a pipe gets in their place."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from app.child_process import PROJECT
from deployments.launcher.terminal import StatusLines

PROGRAM = """
from deployments.launcher.terminal import StatusLines
lines = StatusLines()
lines.show({"small": "starting", "large": "loading the weights " * 5}, done="ready")
lines.show({"small": "ready", "large": "read\\x1b[31my"}, done="ready")
print("done")
"""


def screen(output: str) -> list[str]:
    """What a terminal shows that knows as much of its language as is used here."""
    rows = [""]
    for part in output.replace("\r\n", "\n").replace("\n", "\0\n\0").replace("\x1b[A\x1b[2K", "\0^\0").split("\0"):
        if part == "\n":
            rows.append("")
        elif part == "^":
            rows = [*rows[:-2], ""]
        else:
            rows[-1] += part
    return rows


def test_in_a_terminal_each_line_changes_in_place() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    subprocess.run([sys.executable, "-c", PROGRAM], stdout=theirs, cwd=PROJECT, env=environment, check=True)
    os.close(theirs)
    output = ""
    while not output.endswith("done\r\n"):
        output += os.read(ours, 65536).decode()
    os.close(ours)
    first, *last = output.split("\x1b[A\x1b[2K")
    assert screen(first) == ["  small: starting, 0 s", "  large: loading the weights loading t…", ""]
    assert screen(output) == ["  small: ready", "  large: read[31my, 0 s", "done", ""]
    assert len(last) == 2


def test_elsewhere_each_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = StatusLines()
    lines.show({"demo": "downloading 93 MB, 10%", "other": "starting"}, done="ready")
    lines.show({"demo": "downloading 93 MB, 20%", "other": "ready"}, done="ready")
    assert capsys.readouterr().out.splitlines() == [
        "[  0 s] demo: downloading 93 MB, 10%",
        "[  0 s] other: starting",
        "[  0 s] other: ready",
    ]


def test_what_does_not_change_is_said_again_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 14.0, 20.0])
    monkeypatch.setattr("deployments.launcher.terminal.time.monotonic", lambda: next(clock))
    lines = StatusLines()
    for _ in range(3):
        lines.show({"demo": "loading the weights", "other": "ready"}, done="ready")
    assert capsys.readouterr().out.splitlines() == [
        "[  1 s] demo: loading the weights",
        "[  1 s] other: ready",
        "[ 20 s] demo: loading the weights",
    ]
