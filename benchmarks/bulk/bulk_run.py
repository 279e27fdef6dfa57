"""Starts, watches and kills a bulk run in processes of its own, and reads its results."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.jobs.results import journals_in
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.processes import family, kill_family
from benchmarks.harness.service import application, serve_file

ENGINE, READER = "engine", "reader"
_TITLES = {ENGINE: "ray::EngineActor", READER: "ray::MapWorker"}
_READ_BYTES = 1 << 20


class BulkRun:
    """A bulk run into one output folder. A killed run is started again as a new process."""

    def __init__(self, out: Path, arguments: Sequence[str], *, program: Sequence[str]) -> None:
        """`program`: arguments of the interpreter, such as `-m NAME`. `arguments`: those of the program itself."""
        self._out = out
        self._command = [sys.executable, *program, "--output", str(out), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._num_records = 0
        self._offsets: Counter[Path] = Counter()  # counted bytes of each journal

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=sys.stderr, start_new_session=True)

    def wait(self) -> None:
        """Block until the run ends. Raises BenchmarkError if it fails."""
        status = self.process.wait()
        if status:
            raise BenchmarkError(f"the bulk run ended with status {status}")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "started before it is used"
        return self._process

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self, kind: str, chance: random.Random) -> bool:
        """Kill a random process of a kind. Return False if there was none."""
        found = [pid for pid, each in family(self.process.pid).items() if each.title.startswith(_TITLES[kind])]
        if found:
            os.kill(chance.choice(found), signal.SIGKILL)
        return bool(found)

    def kill_all(self) -> None:
        """Kill the driver and the cluster that it started, as if the node had died."""
        if not self.has_ended:
            kill_family(self.process.pid)
        self.process.wait()

    def num_records(self) -> int:
        """Return the number of complete records so far. Each call reads only new bytes."""
        for journal in journals_in(self._out):
            with journal.open("rb") as file:
                file.seek(self._offsets[journal])
                while content := file.read(_READ_BYTES):
                    self._num_records += content.count(b"\n")
                self._offsets[journal] = file.tell()
        return self._num_records

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._out / "results.jsonl").read_text(encoding="utf-8").splitlines()]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self._out / "summary.json").read_text(encoding="utf-8")))


def own_engines(folder: Path, rows: Path, engine: Mapping[str, Any], *, num_engines: int, num_cpus: float) -> list[str]:
    """Write a configuration into the folder, and return the arguments of a bulk run on its own engines."""
    config = folder / "serve.yaml"
    served = serve_file(application("bulk", engine, {"num_replicas": num_engines, "num_cpus": num_cpus}))
    config.write_text(json.dumps(served), encoding="utf-8")  # JSON is YAML
    return ["--input", str(rows), "--config", str(config)]


def write_rows(path: Path, rows: Iterator[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
