"""The stages of a run, in their order; the file of their results, one JSON object a line for each, and its table.

The module of a stage has `measure(bench)`, which puts figures on the bench.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.figures import table


class Stage(NamedTuple):
    """One stage. Times in seconds, for a GPU of a data centre."""

    name: str
    module: str
    expected_s: int
    measures: str

    @property
    def deadline_s(self) -> int:
        """After so long it is stopped: what a first run compiles may take as long again."""
        return 2 * self.expected_s + 30


STAGES = (
    Stage("rates", "benchmarks.gpu.rates", 20, "versions, the card, rates of copies and of matrix products"),
    Stage("kernels", "benchmarks.gpu.kernels", 100, "every kernel against fp64, then the tests of the kernels"),
    Stage("memory", "benchmarks.gpu.memory", 50, "an 8B model's start; memory predicted against used; the worst step"),
    Stage(
        "decode",
        "benchmarks.gpu.decode",
        100,
        "decode steps by replay against bytes / rate of copies; weights or KV in FP8",
    ),
    Stage(
        "profile", "benchmarks.gpu.profiled", 30, "kernels, launches, gaps and waits of a decode step and a mixed one"
    ),
    Stage("attention", "benchmarks.gpu.attention", 80, "decode GB/s, prefill TFLOP/s; stages x warps x tile"),
    Stage("experts", "benchmarks.gpu.experts", 15, "a layer's experts against the bytes of those that are chosen"),
    Stage("lora", "benchmarks.gpu.lora", 60, "decode steps and prompts with LoRA adapters against none"),
    Stage("sampler", "benchmarks.gpu.sampler", 15, "draws: greedy, T = 1, top-p, top-k, grammar, penalties, logprobs"),
    Stage("engine", "benchmarks.gpu.engine", 110, "the whole engine on requests of ragged lengths"),
    Stage("transformers", "benchmarks.gpu.transformers_batching", 50, "transformers' own batching, the same requests"),
    Stage("faults", "benchmarks.gpu.faults", 20, "the engine after an illegal address and a lack of memory"),
)

# What an H200 should reach with a model of 8B in bfloat16: stage, figure, and whether it is right.
TARGETS: tuple[tuple[str, str, str, Callable[[float], bool]], ...] = (
    ("decode", "share_64x1024", "at least 0.75 of the measured bandwidth", lambda value: value >= 0.75),
    ("decode", "share_256x1024", "at least 0.70", lambda value: value >= 0.70),
    ("decode", "prompt_share_2048", "at least 0.55 of the measured rate of products", lambda value: value >= 0.55),
    ("transformers", "ours_over_theirs", "at least 4", lambda value: value >= 4),
    ("memory", "capture_s", "below 20", lambda value: value < 20),
    ("memory", "predicted_over_used", "within 3%", lambda value: abs(value - 1) <= 0.03),
    ("lora", "ratio_8_of_rank_16", "at most 1.15 of a step without", lambda value: value <= 1.15),
    ("sampler", "top_p_share_64", "at most 0.05 of a step", lambda value: value <= 0.05),
    ("sampler", "top_p_share_256", "at most 0.05 of a step", lambda value: value <= 0.05),
)
NO_CLAIM = "stand-in on a CPU: the figures are no claims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one stage."""

    stage: str
    code: str  # a digest of the files
    device: str
    at: str  # when it ended, UTC
    seconds: float
    commit: str | None = None  # None outside of a git checkout
    note: str | None = None  # NO_CLAIM where it is none
    error: str | None = None  # the end of what it said; figures that it had kept before stand beside it
    figures: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)


class ResultsFile:
    """Results of any number of runs; of each stage the last one counts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, result: Result) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def of(self, *, code: str, device: str) -> dict[str, Result]:
        """By stage, those of this code on this device."""
        if not self._path.exists():
            return {}
        lines = self._path.read_text(encoding="utf-8").splitlines()
        found = [Result(**json.loads(line)) for line in lines if line.strip()]
        return {each.stage: each for each in found if each.code == code and each.device == device}


def report(results: Mapping[str, Result], *, code: str, device: str) -> str:
    """All stages in Markdown."""
    commits = dict.fromkeys(each.commit for each in results.values() if each.commit)
    heading = f"{device}, {' and '.join(commits) or 'no commit'}, files {code}"
    parts = [heading, *([f"**{NO_CLAIM}.**"] if any(each.note for each in results.values()) else [])]
    rows = [(stage.name, *_row(results.get(stage.name)), stage.measures) for stage in STAGES]
    parts.append(table(("stage", "s", "result", "measures"), rows))
    parts.append(table(("target", "bound", "value", "reached"), list(_targets(results))))
    for stage in STAGES:
        if stage.name in results:
            parts += _parts(results[stage.name])
    return "\n\n".join(parts)


def _targets(results: Mapping[str, Result]) -> Iterable[tuple[str, str, str, str]]:
    for stage, figure, bound, is_reached in TARGETS:
        result = results.get(stage)
        value = None if result is None else result.figures.get(figure)
        if result is None or value is None or result.note:
            yield f"{stage}.{figure}", bound, _cell(value), "not measured"
        else:
            yield f"{stage}.{figure}", bound, _cell(value), "yes" if is_reached(value) else "NO"


def _row(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "–", "not run"
    return f"{result.seconds:.0f}", "measured" if result.error is None else "FAILED"


def _parts(result: Result) -> Iterable[str]:
    yield f"### {result.stage}"
    if result.error is not None:
        yield f"```\n{result.error}\n```"
    if result.figures:
        yield table(("figure", "value"), [(name, _cell(value)) for name, value in result.figures.items()])
    for name, rows in result.tables.items():
        heads = list(dict.fromkeys(head for row in rows for head in row))
        yield name
        yield table(heads, [[_cell(row.get(head)) for head in heads] for row in rows])


def _cell(value: object) -> str:
    text = "–" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
    return text.replace("|", "/").replace("\n", " ")
