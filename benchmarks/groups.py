"""Compare the arms of an A/B trial in TTFT, ITL and goodput, from the metrics of the live service.

    python -m benchmarks.groups --base-url http://127.0.0.1:8000 --model demo --seconds 300 --slo-ttft-ms 1000

Sends no request: reads /metrics at the end of each part of the time, while the service has its own traffic. Requests of
one moment are not independent of each other, so the intervals are computed from the differences between parts (batch
means; a mean is a ratio estimator, its variance by linearisation: Cochran, "Sampling Techniques", chapter 6). A verdict
is about one figure: of twenty figures without any difference, one is called better or worse at 95%.

The metrics have these limits:

* Means of TTFT and ITL are exact: a histogram has the sum and the count.
* A share within a limit is exact only at the end of a bucket: other limits are refused. Percentiles are not compared.
* Goodput is the share of requests with their first token within --slo-ttft-ms, among all requests that had a first
  token, failed or missed their deadline. A histogram does not say which tokens belong to which request, so the share of
  tokens within --slo-itl-ms is a separate figure. A request that fails after its first token is counted twice.
* A request counts for the group that computed it. Requests of `class="background"` count only among the failures.

Prints a table for each arm against the reference and one JSON object.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from app.engine.histogram import SECONDS
from benchmarks.harness.command import BenchmarkError, above_zero, command_parser, positive, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.http_call import Target
from benchmarks.harness.service import got

MIN_PARTS = 10  # parts with requests of both arms; fewer parts say too little about their differences
_CONFIDENCE = 0.95  # of each interval
_TTFT, _ITL = "carousel_first_token_seconds", "carousel_inter_token_seconds"
# The heads of the rows, and whether a higher value is better.
_FIRST, _GAPS, _GOOD, _IN_TIME = "TTFT mean s", "ITL mean s", "goodput, share", "tokens in time, share"
_MORE_IS_BETTER = {_FIRST: False, _GAPS: False, _GOOD: True, _IN_TIME: True}
_LOST = ("carousel_engine_failed_total", "carousel_engine_missed_total")
_NEEDED = (_TTFT, _ITL, *_LOST, "carousel_slots", "carousel_scrape_missing")  # other lines are not parsed

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Parts:
    """A sum and a count for each part of a run, in the order of time. Their ratio is a mean, or a share (sum of 1s)."""

    sums: FloatArray
    counts: FloatArray  # for each arm, at least one count is above 0

    @property
    def ratio(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    def residuals(self) -> FloatArray:
        """Return the contribution of each part to the error of the ratio, times the number of parts. Their sum is 0."""
        return (self.sums - self.ratio * self.counts) / float(self.counts.mean())


def difference_of(ours: Parts, theirs: Parts, confidence: float) -> tuple[float, float]:
    """Return our ratio minus their ratio, and the half-width of the confidence interval.

    The parts are pairs: load that rises for both arms in a part cancels out.
    """
    residuals, num_parts = ours.residuals() - theirs.residuals(), len(ours.sums)
    standard_error = math.sqrt(float((residuals**2).sum()) / (num_parts * (num_parts - 1)))
    return ours.ratio - theirs.ratio, critical_value(confidence, num_parts) * standard_error


def critical_value(confidence: float, num_parts: int) -> float:
    """Return the critical value of Student's t for num_parts - 1 degrees of freedom, in standard errors to each side.

    Abramowitz and Stegun 26.7.5; with 10 parts or more, the value is within 0.001 of the tables at 95%.
    """
    x, freedom = NormalDist().inv_cdf((1 + confidence) / 2), num_parts - 1
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


@dataclass(slots=True)
class ArmReading:
    """The counts of a group in one scrape, since the service started."""

    # First tokens, the sum of their seconds, and the first tokens in time; then the same 3 numbers for token gaps.
    counts: FloatArray = field(default_factory=lambda: np.zeros(6))
    lost: dict[str, float] = field(default_factory=dict)  # failed or late requests, by replica


Reading = Mapping[str, ArmReading]  # by group
Arm = Mapping[str, Parts]  # the counts of a group's requests in each part, by the heads of the rows


class Limits(NamedTuple):
    """The limits in seconds. Each limit is the end of a bucket."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure of an arm beside the figure of the reference."""

    arm: str
    figure: str
    value: float
    reference_value: float
    difference: float
    low: float
    high: float
    verdict: str


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Watch the service for the given time, then compare the arms.

    Raises:
        BenchmarkError: /metrics cannot be read, there is no such model or reference, or there are too few requests.
    """
    limits = Limits(_limit("--slo-ttft-ms", given.slo_ttft_ms), _limit("--slo-itl-ms", given.slo_itl_ms))
    text = metrics_of(given.base_url, given.key_file)
    readings = watched(text, given.model, limits, seconds=given.seconds, num_parts=given.parts)
    names = sorted(readings[0])
    reference = names[0] if given.reference is None else given.reference
    if reference not in names:
        raise BenchmarkError(f"--reference {reference}: there is no such group; there are {', '.join(names)}")
    arms = {name: arm_of(name, readings) for name in names}
    findings = [
        finding
        for name in names
        if name != reference
        for finding in compared(name, arms[name], arms[reference], confidence=_CONFIDENCE)
    ]
    print(in_words(findings, reference))
    return {
        "reference": reference,
        "seconds": given.seconds,
        "num_requests": {name: num_requests(arm) for name, arm in arms.items()},
        "findings": [asdict(finding) for finding in findings],
    }


# ---------------------------------------------------------------------- reading


def metrics_of(base_url: str, key_file: str | None) -> Callable[[], str]:
    """Return a function that gets the text of /metrics. Both raise BenchmarkError: a wrong option, or no response."""
    target, headers = Target.parse(base_url), {}
    if key_file is not None:
        try:
            headers["Authorization"] = f"Bearer {Path(key_file).read_text(encoding='utf-8').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"--key-file {key_file} cannot be read: {error}") from error

    def text() -> str:
        try:
            return got(target, "/metrics", headers).decode()
        except urllib.error.HTTPError as error:
            hint = "; give a key that may read it: --key-file FILE" if error.code in (401, 403) else ""
            raise BenchmarkError(f"{target.url('/metrics')} answers with status {error.code}{hint}") from error
        except OSError as error:
            raise BenchmarkError(f"{target.url('/metrics')} does not answer: {error}") from error

    return text


def watched(text: Callable[[], str], model: str, limits: Limits, *, seconds: float, num_parts: int) -> list[Reading]:
    """Take a reading at the start and one at the end of each part.

    A reading that lacks a process is left out: its part and the next part become one.
    """
    start = time.monotonic()
    readings: list[Reading] = []
    for number in range(num_parts + 1):
        time.sleep(max(0.0, start + number * seconds / num_parts - time.monotonic()))
        reading = read(text(), model, limits)
        if reading is None:
            tell(f"part {number} of {num_parts}: a process did not answer in time; this reading is left out")
            continue
        if readings and reading.keys() != readings[0].keys():
            raise BenchmarkError("the groups have changed during the comparison: keep the config while it runs")
        if readings:
            since = {name: arm.counts[0] - readings[0][name].counts[0] for name, arm in reading.items()}
            done = ", ".join(f"{name} {number:,.0f} requests" for name, number in since.items())
            tell(f"part {number} of {num_parts}: {done}")
        readings.append(reading)
    if len(readings) <= MIN_PARTS:
        raise BenchmarkError(
            f"{len(readings)} of {num_parts + 1} scrapes were whole; at least {MIN_PARTS + 1} are needed"
        )
    return readings


def read(text: str, model: str, limits: Limits) -> Reading | None:
    """Return the groups of a model in the text of /metrics, or None if the text lacks a process.

    Raises:
        BenchmarkError: there is no such model, or the model has fewer than two groups.
    """
    needed = "\n".join(line for line in text.splitlines() if line.startswith(_NEEDED))
    samples = [sample for family in text_string_to_metric_families(needed) for sample in family.samples]
    if any(sample.name == "carousel_scrape_missing" and sample.value for sample in samples):
        return None
    of_model = [(each.name, each.labels, each.value) for each in samples if each.labels.get("model_name") == model]
    groups = {labels["group"] for _, labels, _ in of_model if "group" in labels} - {""}
    if len(groups) < 2:
        models = sorted({each.labels["model_name"] for each in samples if each.name == "carousel_slots"})
        if model not in models:
            raise BenchmarkError(
                f"--model {model}: /metrics has no replicas of it; it has {', '.join(models) or 'none'}"
            )
        raise BenchmarkError(
            f"--model {model} has {'only the group ' + min(groups) if groups else 'no groups'}; a trial needs at least "
            f"two in replicas.groups, each with a replica"
        )
    reading = {name: ArmReading() for name in sorted(groups)}
    for name, labels, value in of_model:
        if labels.get("group") in groups:
            _count(reading[labels["group"]], name, labels, value, limits)
    return reading


def _count(arm: ArmReading, name: str, labels: Mapping[str, str], value: float, limits: Limits) -> None:
    if name in _LOST:
        arm.lost[labels["replica"]] = arm.lost.get(labels["replica"], 0.0) + value
    elif labels.get("class") == "foreground":
        for first, histogram, limit_s in ((0, _TTFT, limits.ttft_s), (3, _ITL, limits.itl_s)):
            for place, ending in enumerate(("_count", "_sum", "_bucket"), start=first):
                if name == histogram + ending and (ending != "_bucket" or float(labels["le"]) == limit_s):
                    arm.counts[place] = value


def arm_of(name: str, readings: Sequence[Reading]) -> Arm:
    """Return a group's counts in each part.

    Raises:
        BenchmarkError: the group had requests in too few parts, or its counts fell.
    """
    arms = [reading[name] for reading in readings]
    added = np.diff([arm.counts for arm in arms], axis=0).T
    num_first, ttft_s, in_time, num_gaps, itl_s, gaps_in_time = added
    if (num_first < 0).any() or (num_gaps < 0).any():
        raise BenchmarkError(f"the counts of the group {name} fell: an ingress has ended or restarted; start again")
    lost = np.array([_newly_lost(before.lost, after.lost) for before, after in pairwise(arms)])
    for what, counts in (("requests", num_first), ("requests with more than one token", num_gaps)):
        num_used = int((counts > 0).sum())
        if num_used < MIN_PARTS:
            raise BenchmarkError(
                f"the group {name} had {what} in {num_used} of {len(counts)} parts; at least {MIN_PARTS} are needed: "
                f"watch for longer (--seconds), or send it a larger share"
            )
    return {
        _FIRST: Parts(ttft_s, num_first), _GAPS: Parts(itl_s, num_gaps), _GOOD: Parts(in_time, num_first + lost),
        _IN_TIME: Parts(gaps_in_time, num_gaps),
    }  # fmt: skip


def num_requests(arm: Arm) -> float:
    return float(arm[_FIRST].counts.sum())


def _newly_lost(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    """Return the new losses. The last counts of a replica that ended or restarted are unknown and count as 0."""
    return sum(max(0.0, value - before.get(replica, 0.0)) for replica, value in after.items())


# ---------------------------------------------------------------------- comparing


def compared(name: str, arm: Arm, reference: Arm, *, confidence: float) -> list[Finding]:
    """Compare all figures of an arm with the figures of the reference."""
    findings = []
    for figure, more_is_better in _MORE_IS_BETTER.items():
        ours, theirs = arm[figure], reference[figure]
        difference, reach = difference_of(ours, theirs, confidence)
        low, high = difference - reach, difference + reach
        verdict = "no difference shown"
        if low > 0 or high < 0:
            verdict = "better" if (difference > 0) == more_is_better else "worse"
        findings.append(Finding(name, figure, ours.ratio, theirs.ratio, difference, low, high, verdict))
    return findings


def in_words(findings: Sequence[Finding], reference: str) -> str:
    """Return a table with a line for each figure of each arm."""
    rows = [
        [each.arm, each.figure, f"{each.value:.4g}", f"{each.reference_value:.4g}", f"{each.difference:+.3g}",
         f"{each.low:+.3g} … {each.high:+.3g}", each.verdict]
        for each in findings
    ]  # fmt: skip
    return table(["arm", "figure", "its", f"{reference}'s", "difference", "interval", "verdict"], rows)


# ---------------------------------------------------------------------- options


def _limit(option: str, milliseconds: float) -> float:
    """Return the limit in seconds. Raises BenchmarkError if the limit is not the end of a bucket."""
    seconds = milliseconds / 1000
    found = next((bound for bound in SECONDS if math.isclose(bound, seconds)), None)
    if found is None:
        near = sorted(sorted(SECONDS, key=lambda bound: abs(math.log(bound / seconds)))[:4])
        raise BenchmarkError(
            f"{option} {milliseconds:g}: no bucket of the metrics ends there, so the share within it is unknown; near "
            f"it are {', '.join(f'{bound * 1000:g}' for bound in near)}"
        )
    return found


def _num_parts(text: str) -> int:
    number = positive(text)
    if number < MIN_PARTS:
        raise argparse.ArgumentTypeError(f"{number} is below {MIN_PARTS}")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("groups", __doc__)
    parser.add_argument("--base-url", required=True, metavar="URL", help="http://HOST:PORT, with or without /v1")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model's name in the service, no alias")
    parser.add_argument("--seconds", type=above_zero, default=300.0, metavar="S", help="how long to watch (300)")
    parser.add_argument("--parts", type=_num_parts, default=30, metavar="N", help="number of parts of that time (30)")
    parser.add_argument(
        "--slo-ttft-ms", type=above_zero, default=1000.0, metavar="MS", help="limit of the first token (1000)"
    )
    parser.add_argument("--slo-itl-ms", type=above_zero, default=100.0, metavar="MS", help="limit of each gap (100)")
    parser.add_argument("--reference", metavar="GROUP", help="the group to compare with; default: first by name")
    parser.add_argument("--key-file", metavar="FILE", help="a file with an API key that may read /metrics")
    return parser


if __name__ == "__main__":
    sys.exit(main())
