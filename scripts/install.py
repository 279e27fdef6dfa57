"""Run `pip install`, and show one line with the present step of pip. The output of pip is printed if pip fails.

This module needs only the standard library.

    python -m scripts.install -c constraints.txt -e .
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Sequence

from deployments.launcher.terminal import StatusLines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pip and return its exit status."""
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "install", *options, *(sys.argv[1:] if arguments is None else arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None, "it is a pipe"
        printed: list[str] = []
        reader = threading.Thread(target=printed.extend, args=(pip.stdout,))
        reader.start()
        lines = StatusLines()
        while reader.is_alive():
            lines.show({"packages": step_in(printed, has_names=sys.stdout.isatty())})
            reader.join(timeout=0.3)
    if pip.returncode:
        sys.stderr.writelines(printed)
    else:
        done = f"installed after {lines.elapsed_s:.0f} s"
        lines.show({"packages": done}, done=done)
    return pip.returncode


def step_in(printed: Sequence[str], *, has_names: bool) -> str:
    """Return the present step of pip, from the lines that pip has printed. has_names: the step names its package."""
    for line in reversed(printed):
        if line.startswith("Installing collected packages"):
            return f"installing {line.count(',') + 1} packages"
        if match := re.match(r" *(Collecting|Downloading|Using cached) (.*)", line):
            return "downloading" + f" {match[2].partition(' (from')[0]}" * has_names
    return "starting pip"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped. Run the same command again to resume the set-up.")
