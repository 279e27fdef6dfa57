"""The stages of a run in their order, the file of their results (one JSON object a line), and the table of results.

The module of a stage has `measure(bench)`, which puts figures on the bench.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.figures import table


class Stage(NamedTuple):
    """One stage. Times are in seconds and guessed for a data-centre GPU; no stage has run on one."""

    name: str
    file: str  # the module in this package
    expected_s: int
    measures: str
    num_passes: int = 1  # runs of the stage; second runs come after the first runs of all such stages
    also: tuple[str, ...] = ()  # paths that the stage runs beyond its imports, from the project's root

    @property
    def module(self) -> str:
        return f"benchmarks.gpu.{self.file}"

    def deadline_s(self, slow: float) -> float:
        """Return the seconds until the stage is stopped, with time for compilation. slow: factor on the guess."""
        return slow * (2 * self.expected_s + 30)


# Stages with targets, and the stages that these are compared with, come first and run twice.
STAGES = (
    Stage("contact", "contact", 180, "each backend on small models: does it load, and equal plain torch's tokens?"),
    Stage("rates", "rates", 20, "versions, the card, rates of copies and of matrix products", 2),
    Stage("decode", "decode", 60, "steps by replay against bytes / rate of copies; prompts", 2),
    Stage("engine", "engine", 40, "the whole engine on requests of ragged lengths", 2),
    Stage("transformers", "transformers_batching", 60, "transformers' own batching of the requests of `engine`", 2),
    Stage("sampler", "sampler", 20, "draws: greedy, top-p, top-k, grammar, penalties, logprobs", 2),
    Stage("memory", "memory", 50, "an 8B model's start; memory predicted and used; the worst step", 2),
    Stage("lora", "lora", 50, "decode steps and prompts with LoRA adapters against none", 2),
    Stage("attention", "attention", 70, "decode GB/s, prefill TFLOP/s, torch's beside; other launches"),
    Stage("kernels", "kernels", 60, "every kernel against fp64"),
    Stage("decode-fp8", "decode", 40, "the steps of `decode` with weights in FP8"),
    Stage("decode-kv8", "decode", 40, "the steps of `decode` with KV memory in FP8"),
    Stage("engine-settings", "engine", 90, "the engine without overlap, without graphs, batch_invariant"),
    Stage("experts", "experts", 20, "a layer's experts against the bytes of the chosen experts"),
    Stage("tier", "tier", 40, "the first token of a prompt from a folder against computing it"),
    Stage("profile", "profiled", 30, "kernels, launches, gaps and waits of a decode step and a mixed one"),
    Stage("sleep", "memory", 50, "an 8B model that sleeps and wakes"),
    Stage("replicas", "sharing", 120, "two replicas on one card, with MPS and without, against one"),
    Stage("ranks", "sharing", 90, "a model on two cards against one"),
    Stage("service", "round_trip", 90, "the whole service with Ray: answers over HTTP", also=("deployments",)),
    Stage("faults", "faults", 40, "the engine after an illegal address and a lack of memory"),
    Stage("tests", "kernel_tests", 150, "the tests of the kernels", also=("tests/model/cuda",)),
)

# Targets of an H200 with an 8B model in bfloat16: stage, figure, bound, and a check of the figure.
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
_HEADS = ("stage", "s", "result", "passes", "commit", "SM MHz", "slowed by", "other processes", "measures")
SKIPPED = "skipped"  # the figure of `Bench.skip`
NO_CLAIM = "stand-in on a CPU: the figures are no claims"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one run of a stage."""

    stage: str
    code: str  # a digest of the stage's files
    device: str
    at: str  # when the run ended, UTC
    seconds: float
    commit: str | None = None  # None outside of a git checkout
    note: str | None = None  # NO_CLAIM if the figures are no claims
    error: str | None = None  # the end of the stage's output; figures stored before the error remain
    card: Mapping[str, Any] = field(default_factory=dict)  # the card during the run, by the driver
    figures: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)


class ResultsFile:
    """A file with the results of any number of runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, result: Result) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def of(self, device: str) -> dict[str, list[Result]]:
        """Return all results on this device, by stage and in their order."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        found: dict[str, list[Result]] = {}
        for result in (Result(**json.loads(line)) for line in lines):
            if result.device == device:
                found.setdefault(result.stage, []).append(result)
        return found


def measured(results: Iterable[Result]) -> list[Result]:
    """Return the results that ended without an error and were not skipped."""
    return [each for each in results if each.error is None and SKIPPED not in each.figures]


def summed_up(results: Sequence[Result]) -> Result:
    """Return the last of a stage's results, with the medians of the figures of all passes."""
    passes = measured(results)
    if not passes:
        return results[-1]
    last = passes[-1]
    medians = {name: _median(values) for name in last.figures if (values := _numbers(passes, name))}
    return replace(last, figures={**last.figures, **medians}, seconds=sum(each.seconds for each in passes))


def report(found: Mapping[str, Sequence[Result]], *, codes: Mapping[str, str], device: str) -> str:
    """Return all stages as Markdown. codes: the present digests of the stages' files."""
    results = {name: summed_up(each) for name, each in found.items()}
    parts = [device, *([f"**{NO_CLAIM}.**"] if any(each.note for each in results.values()) else [])]
    rows = [(stage.name, *_row(found.get(stage.name, ()), codes), stage.measures) for stage in STAGES]
    parts.append(table(_HEADS, rows))
    parts.append(table(("target", "bound", "median", "least", "passes", "reached"), list(_targets(found))))
    for stage in STAGES:
        if stage.name in results:
            parts += _parts(results[stage.name])
    return "\n\n".join(parts)


def _targets(found: Mapping[str, Sequence[Result]]) -> Iterable[Sequence[str]]:
    for stage, figure, bound, is_reached in TARGETS:
        results = found.get(stage, ())
        values = _numbers(measured(results) or results[-1:], figure)
        if not values:
            yield f"{stage}.{figure}", bound, "–", "–", "0", "not measured"
            continue
        median = _median(values)
        reached = "not measured" if results[-1].note else "yes" if is_reached(median) else "NO"
        yield f"{stage}.{figure}", bound, _cell(median), _cell(min(values)), str(len(values)), reached


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 6)


def _numbers(results: Iterable[Result], figure: str) -> list[float]:
    values = (each.figures.get(figure) for each in results)
    return [each for each in values if isinstance(each, int | float)]


def _row(results: Sequence[Result], codes: Mapping[str, str]) -> Sequence[str]:
    if not results:
        return "–", "not run", *["–"] * 5
    result, passes = summed_up(results), measured(results)
    skipped = result.figures.get(SKIPPED)
    word = "FAILED" if result.error is not None else "measured" if skipped is None else f"skipped: {skipped}"
    commit = (result.commit or f"files {result.code}") + (
        "" if result.code == codes.get(result.stage) else ", other files"
    )
    card = (_cell(result.card.get(name)) for name in ("sm_mhz", "slowed_by", "other_processes"))
    return f"{result.seconds:.0f}", word, str(len(passes)), commit, *card


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
