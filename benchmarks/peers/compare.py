"""Compare several engines in turn, interleaved, on one machine and one set of requests.

    python -m benchmarks.peers.compare --model DIR --workload FILE carousel hf-static-32 \\
        'ours int8 = carousel --set model.quantization=int8' \\
        'vLLM-CPU = cmd:$VLLM_ENV/bin/python -m benchmarks.peers.engines vllm-cpu {common}'

Each entry runs as its own process, A B A B …, so that a machine that changes with the hour changes for all entries.
Prints a table of medians for each workload and, as the last line, one JSON object. A ratio is the median over the
rounds of an entry's output tokens a second, divided by the first entry's in the same round. A `cmd:` entry prints a
JSON object last, with `output_tokens_per_s`; `{common}` in it stands for the options of all entries. An entry that
refuses a workload of `--also` is left out of all workloads. With `--beside N`, N busy loops run meanwhile as neighbours
on the same cores.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, did_you_mean, positive, run_command, tell
from benchmarks.harness.figures import cell, table
from benchmarks.harness.options import add_run_options
from benchmarks.harness.turns import last_object, run_module
from benchmarks.harness.workload import read_workloads
from benchmarks.peers.engines import HF

_SHELL = "cmd:"
FIRST = "workload"
FIGURES = (
    "output_tokens_per_s", "total_tokens_per_s", "seconds", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s",
    "latency_p50_s", "latency_p99_s", "peak_rss_mb", "prompt_tokens_per_s", "decode_tokens_per_s", "start_to_ready_s",
    "start_to_first_token_s",
)  # fmt: skip


Figures = Mapping[str, float | None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("peers.compare", __doc__)
    parser.add_argument("entries", nargs="+", metavar="ENTRY", help="carousel, a peer's name, or cmd:SHELL COMMAND")
    add_run_options(parser, repeat=1, also=True)
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="processes of each entry")
    parser.add_argument("--beside", type=positive, default=0, metavar="N", help="number of busy loops during the runs")
    return run_command(
        parser, measure, arguments, is_bad=lambda found: any(entry["failure"] for entry in found["entries"])
    )


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run every entry once a round and print a table for each workload. An entry that failed is not run again."""
    workloads = list(read_workloads([given.workload, *given.also]))  # an error in a workload is found here
    common = _common(given)
    entries = [Entry.parse(text, common, workloads) for text in given.entries]
    with _busy_loops(given.beside):
        for number in range(1, given.rounds + 1):
            for entry in entries:
                if entry.failure is None:
                    tell(f"== round {number} of {given.rounds}: {entry.name}")
                    entry.run()
    found = [
        {"name": entry.name, "failure": entry.failure, "engine": entry.text}
        | {"workloads": {workload: entry.figures(workload, entries[0]) for workload in workloads}}
        for entry in entries
    ]
    for workload in workloads:
        print(*([f"\n{workload}\n"] if len(workloads) > 1 else []), in_words(found, workload), sep="")
    return {"entries": found, "beside": given.beside}


@contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


_TIMES = ("seconds", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "latency_p50_s", "latency_p99_s")


def in_words(entries: Sequence[Mapping[str, Any]], workload: str) -> str:
    """Return the medians as a table; the first entry's throughput is 1."""
    heads = ["entry", "output tok/s", "from – to", "ratio", "prompt tok/s", "decode tok/s", "seconds", "TTFT p50",
             "TTFT p99", "ITL p50", "ITL p99", "latency p50", "latency p99", "peak MB"]  # fmt: skip
    rows = []
    for entry in entries:
        figures = entry["workloads"][workload]
        speeds = figures["all_output_tokens_per_s"]
        rows.append(
            [
                entry["name"] if entry["failure"] is None else f"{entry['name']} (failed)",
                cell(figures["output_tokens_per_s"], "{:,.1f}"),
                f"{min(speeds):,.0f} – {max(speeds):,.0f}" if speeds else "–",
                cell(figures["ratio"], "{:.2f}"),
                *(cell(figures[name], "{:,.1f}") for name in ("prompt_tokens_per_s", "decode_tokens_per_s")),
                *(cell(figures[name], "{:.3f}") for name in _TIMES),
                cell(figures["peak_rss_mb"], "{:,.0f}"),
            ]
        )
    return table(heads, rows)


def _common(given: argparse.Namespace) -> list[str]:
    common = ["--model", given.model, "--workload", given.workload, "--threads", str(given.threads)]
    common += ["--also", *given.also] if given.also else []
    common += ["--repeat", str(given.repeat)]
    for option in ("dtype", "device"):
        if getattr(given, option) is not None:
            common += [f"--{option}", getattr(given, option)]
    return common


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 6) if known else None


@dataclass(slots=True)
class Entry:
    """One engine of a comparison (our program with arguments, or a shell command) and its results."""

    name: str
    text: str
    workloads: tuple[str, ...]
    module: str = ""
    arguments: tuple[str, ...] = ()
    rounds: list[dict[str, Figures]] = field(default_factory=list)  # by workload
    failure: str | None = None

    @classmethod
    def parse(cls, text: str, common: Sequence[str], workloads: Sequence[str] = (FIRST,)) -> Entry:
        """Parse `carousel …`, a peer's name with options, or `cmd:SHELL COMMAND`.

        A name for the tables may precede the entry: `NAME = …`. `common`: the arguments of every program of ours.
        `workloads`: the names of the first workload and of the workloads of `--also`.

        Raises:
            BenchmarkError: the text is none of these.
        """
        label, equals, rest = text.partition(" = ")
        if not equals or text.startswith(_SHELL):
            label = rest = text
        names = tuple(workloads)
        if rest.startswith(_SHELL):
            return cls(label, rest.replace("{common}", shlex.join(common)), names)
        name, *options = shlex.split(rest) or [""]
        if name == "carousel":
            return cls(label, rest, names, "benchmarks.engine.throughput", (*common, *options))
        if name in HF:
            return cls(label, rest, names, "benchmarks.peers.engines", (name, *common, *options))
        raise BenchmarkError(f"there is no entry {name!r}{did_you_mean(name, ('carousel', *HF, _SHELL))}")

    def run(self) -> None:
        """Run the process to its end; its stderr is shown as it comes."""
        try:
            found = last_object(run_module(self.module, self.arguments) if self.module else self._shell_output())
            first, *others = self.workloads
            also = found.get("also") or {}
            figures = {first: figures_in(found)} | {name: figures_in(also.get(name, {})) for name in others}
        except BenchmarkError as error:
            self.failure = str(error)
            tell(f"== failed: {self.name}: {error}")
        else:
            self.rounds.append(figures)

    def figures(self, workload: str, first: Entry) -> dict[str, Any]:
        """Return medians over the rounds, and ratios to the first entry's output tokens a second in the same round."""
        pairs = zip(self._speeds(workload), first._speeds(workload), strict=False)
        ratios = [round(speed / base, 4) for speed, base in pairs if base]
        return {
            "ratio": _median(ratios),
            "all_ratios": ratios,
            "all_output_tokens_per_s": self._speeds(workload),
            **{name: _median([found[workload][name] for found in self.rounds]) for name in FIGURES},
        }

    def _speeds(self, workload: str) -> list[float]:
        return [found[workload]["output_tokens_per_s"] or 0.0 for found in self.rounds]

    def _shell_output(self) -> str:
        command = ["/bin/sh", "-c", self.text.removeprefix(_SHELL)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise BenchmarkError(f"the command ended with status {done.returncode}")
        return done.stdout


def figures_in(found: Mapping[str, Any]) -> Figures:
    """Return the figures of one workload. Raises BenchmarkError if there are none."""
    figures = {name: _number(found.get(name)) for name in FIGURES}
    if figures["output_tokens_per_s"] is None:
        raise BenchmarkError("the printed JSON has no output_tokens_per_s")
    return figures


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    sys.exit(main())
