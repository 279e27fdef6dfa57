"""One entry of a comparison: what to start, and how to read the figures that it prints last."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.command import BenchmarkError, did_you_mean
from benchmarks.peers.hf import PEERS

_PROJECT = Path(__file__).resolve().parent.parent.parent
_SHELL = "cmd:"

# The keys of our JSON, and what the peers' scripts call the same thing.
_OTHER_NAMES = {
    "output_tokens_per_s": "out_tok_s",
    "total_tokens_per_s": "tok_s",
    "latency_p50_s": "latency_p50",
    "latency_p99_s": "latency_p99",
}
FIGURES = (
    "output_tokens_per_s", "total_tokens_per_s", "seconds", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s",
    "latency_p50_s", "latency_p99_s", "peak_rss_mb",
)  # fmt: skip

Figures = Mapping[str, float | None]


class EntryFailed(Exception):
    """An entry's process failed, or printed no figures. The comparison goes on without it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A name for the table and a command for the machine."""

    name: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, common: Sequence[str]) -> Entry:
        """`carousel …`, `http …` (ours as a service), a peer's name with options, or `cmd:SHELL COMMAND`.

        `common`: what every one of ours is given.

        Raises:
            BenchmarkError: it is none of these.
        """
        if text.startswith(_SHELL):
            return cls(text, ("/bin/sh", "-c", text.removeprefix(_SHELL)))
        name, *options = shlex.split(text) or [""]
        if name == "carousel":
            return cls(text, (sys.executable, "-m", "benchmarks.engine.throughput", *common, *options))
        if name == "http":
            return cls(text, (sys.executable, "-m", "benchmarks.service.over_http", *common, *options))
        if name in PEERS:
            return cls(text, (sys.executable, "-m", "benchmarks.peers.hf", name, *common, *options))
        raise BenchmarkError(f"there is no entry {name!r}{did_you_mean(name, ('carousel', 'http', *PEERS, _SHELL))}")

    def run(self) -> Figures:
        """Run the process to its end; its stderr is shown as it comes.

        Raises:
            EntryFailed: it ended with an error, or its last line is no JSON with output tokens a second.
        """
        paths = [str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} if self._is_ours else None
        done = subprocess.run(self.command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        if done.returncode != 0:
            raise EntryFailed(f"it ended with status {done.returncode}")
        return read_figures(done.stdout)

    @property
    def _is_ours(self) -> bool:
        return not self.name.startswith(_SHELL)


def read_figures(stdout: str) -> dict[str, float | None]:
    """The figures in the last line of a process's output. Raises EntryFailed when there are none."""
    lines = stdout.strip().splitlines()
    try:
        found: Any = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise EntryFailed("its last line of output is no JSON object")
    figures = {name: _number(found.get(name, found.get(_OTHER_NAMES.get(name, name)))) for name in FIGURES}
    if figures["output_tokens_per_s"] is None:
        raise EntryFailed("its JSON has neither output_tokens_per_s nor out_tok_s")
    return figures


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
