"""Memory of replicas of one machine that share their packed weights, one against two.

    python -m benchmarks.engine.replica_memory --model DIR [--dtype bf16] [--quantization int8] [--replicas 2]

Each replica is an engine in a process of its own, with KV memory of one block a sequence. They start together, and
generate together. Memory is the sum of all processes' proportional set sizes (PSS): a page that several have mapped
counts once. The peak is of the whole time, sampled. "weights" is the part that lies in the memory of packed weights. A
run before makes the kept check of the model, so that what is measured is any later start. The last line of stdout is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

from app.assembly import build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig
from app.engine.request import Request, SamplingParams
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.options import DTYPES

_AS_REPLICA = "as-replica"
_BLOCK_SIZE = 16
_NUM_PROMPT_TOKENS = 64
_WEIGHTS = "/memfd:carousel-weights"
_SAMPLE_S = 0.02


class _Sampled:
    """Bytes that some processes hold together, from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._ended = Event()
        self.peak = 0
        self._thread = Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def of_weights(self) -> int:
        return sum(_weights_pss(pid) for pid in self._pids)

    def now(self) -> int:
        return sum(_pss(pid) for pid in self._pids)

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak = max(self.peak, self.now())


def measure(given: argparse.Namespace) -> dict[str, Any]:
    _run(given, 1)
    counts = (1, given.replicas)
    rounds = [[_run(given, number) for number in counts] for _ in range(given.rounds)]
    figures: dict[str, Any] = {}
    for at, number in enumerate(counts):
        runs = [each[at] for each in rounds]
        figures[f"{number}"] = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
        tell(f"{number} replicas: {figures[f'{number}']}")
    one, several = (figures[f"{number}"] for number in counts)
    return figures | {
        f"{name}_ratio": round(several[f"{name}_mib"] / one[f"{name}_mib"], 3)
        for name in ("peak", "running", "weights")
        if one[f"{name}_mib"]
    }


def _run(given: argparse.Namespace, number: int) -> dict[str, float]:
    """Replicas that start and generate together: their memory, and seconds until the last engine is loaded."""
    options = (given.model, DTYPES[given.dtype], given.quantization, f"{given.threads}", f"{given.tokens}")
    command = [sys.executable, "-m", "benchmarks.engine.replica_memory", _AS_REPLICA, *options]
    replicas = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)
    ]
    memory = _Sampled([replica.pid for replica in replicas])
    try:
        ready = [_answer(replica.stdout) for replica in replicas]
        for replica in replicas:
            assert replica.stdin is not None
            replica.stdin.write("generate\n")
            replica.stdin.flush()
        if len({str(_answer(replica.stdout)["tokens"]) for replica in replicas}) != 1:
            raise BenchmarkError("the replicas generate different tokens")
        running, weights = memory.now(), memory.of_weights()
        memory.stop()
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()
    return {
        "peak_mib": memory.peak / 2**20,
        "running_mib": running / 2**20,
        "weights_mib": weights / 2**20,
        "load_s": max(each["load_s"] for each in ready),
    }


def _answer(output: IO[str] | None) -> dict[str, Any]:
    assert output is not None
    line = output.readline()
    if not line:
        raise BenchmarkError("a replica has ended: stderr says why")
    found: dict[str, Any] = json.loads(line)
    return found


def _pss(pid: int) -> int:
    """Proportional set size in bytes; 0 of a process that has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _weights_pss(pid: int) -> int:
    total, is_weights = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:  # the addresses of a mapping, then its file
            is_weights = _WEIGHTS in line
        elif is_weights and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def as_replica(model: str, dtype: str, quantization: str, threads: str, tokens: str) -> None:
    """Load an engine, say how long it took; generate when told to, and say what."""
    began = time.monotonic()
    settings = {"path": model, "device": "cpu", "dtype": dtype, "quantization": quantization, "num_threads": threads}
    num_tokens = int(tokens)
    num_blocks = (_NUM_PROMPT_TOKENS + num_tokens) // _BLOCK_SIZE + 1
    cache = CacheConfig(num_blocks=num_blocks, block_size=_BLOCK_SIZE)
    engine = build_sync_engine(EngineConfig(model=ModelConfig.model_validate(settings), cache=cache))
    print(json.dumps({"load_s": time.monotonic() - began}), flush=True)
    sys.stdin.readline()
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    prompt = tuple(range(100, 100 + _NUM_PROMPT_TOKENS))
    engine.add(Request(request_id="r", prompt_token_ids=prompt, sampling=sampling))
    generated: list[int] = []
    while engine.has_work:
        generated += [token for output in engine.step() for token in output.token_ids]
    print(json.dumps({"tokens": generated}), flush=True)
    sys.stdin.readline()


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.replica_memory", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a model")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of the weights (default: bf16)")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--replicas", type=positive, default=2, metavar="N", help="against one (default: 2)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of each, in turn (default: 3)")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="of each (default: 1)")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="that each generates (default: 64)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == [_AS_REPLICA]:
        as_replica(*sys.argv[2:])
        sys.exit()
    sys.exit(main())
