"""Compares streams with the reference answers, and makes the figures of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.chaos.stage import Stage
from benchmarks.chaos.traffic import Traffic
from benchmarks.harness.answer import TIMEOUT, Answer
from benchmarks.harness.figures import percentile

_AFTERMATH_S = 10.0  # seconds after a fault in which a pause counts as an effect of the fault
SAMPLES = "_samples"  # suffix of lists of single measurements, which a printed line leaves out


def judged(answers: Sequence[Answer], reference: Mapping[str, Answer]) -> dict[str, Any]:
    """Return counts of streams. A simulated token depends on all previous tokens, so an error changes all later ones.

    The API reports the text and the number of tokens, but no token ids. A wrong stream that is shorter than its
    reference counts as `lost`, a longer stream as `repeated`, a stream of equal length as `different`.
    """
    complete = [each for each in answers if each.is_complete]
    wrong = [each for each in complete if each.said != reference[each.name].said]
    lengths = [_num_characters(each) - _num_characters(reference[each.name]) for each in wrong]
    return {
        "streams": len(answers),
        "completed": len(complete),
        "lost": sum(length < 0 for length in lengths),
        "repeated": sum(length > 0 for length in lengths),
        "different": sum(length == 0 for length in lengths),
        "malformed": sum(not each.is_well_formed for each in answers),
        "hung": sum(each.failure == TIMEOUT for each in answers),
        "other_ends": dict(Counter(each.outcome for each in answers if not each.is_complete)),
    }


def outcomes(answers: Sequence[Answer], reference: Mapping[str, Answer]) -> dict[str, int]:
    """Return counts of streams by their results for the clients.

    right, wrong: complete answers. refused, ended: an API error as the response, or inside the stream. cut: the
    connection failed or broke. by_proxy: an error that is not an API error. hung: no end before the client's timeout.
    malformed: anything else.
    """
    found = Counter(_outcome(each, reference) for each in answers)
    names = ("right", "wrong", "refused", "ended", "cut", "by_proxy", "hung", "malformed")
    return {name: found[name] for name in names}


def _outcome(answer: Answer, reference: Mapping[str, Answer]) -> str:
    if answer.is_complete:
        return "right" if answer.said == reference[answer.name].said else "wrong"
    if answer.failure is not None:
        return "hung" if answer.failure == TIMEOUT else "cut"
    if answer.status != 200:
        return "by_proxy" if answer.error is None else "refused"
    return "ended" if answer.is_well_formed and answer.error is not None else "malformed"


def is_bad(line: Mapping[str, Any]) -> bool:
    """Return whether a row shows a failure: a wrong or hung stream, left-over resources, or missing processes."""
    counted = [line, line.get("after", {}), line.get("outcomes", {})]
    names = ("lost", "repeated", "different", "hung", "wrong")
    of_all = any(counts.get(name) for counts in counted for name in names)
    after = line.get("after", {})
    is_whole = sum(after.values()) == after.get("right", 0) and not line.get("missing")
    return bool(of_all or not is_whole or any(line.get("left_over", {}).values()))


def _num_characters(answer: Answer) -> int:
    return sum(map(len, answer.texts.values()))


def by_kind(answers: Sequence[Answer], reference: Mapping[str, Answer]) -> dict[str, dict[str, int]]:
    """Return, for each kind of request, the numbers of sent requests, complete answers and wrong complete answers."""
    counts: dict[str, dict[str, int]] = {}
    for each in answers:
        count = counts.setdefault(each.name.split()[0], {"asked": 0, "completed": 0, "wrong": 0})
        count["asked"] += 1
        count["completed"] += each.is_complete
        count["wrong"] += each.is_complete and each.said != reference[each.name].said
    return counts


def in_flight(answers: Iterable[Answer], at_s: float) -> list[Answer]:
    """Return the streams that ran at time `at_s`."""
    return [each for each in answers if each.begun_s <= at_s <= (each.ended_s or at_s)]


def pauses_ms(streams: Iterable[Answer], struck_s: float, *, step_s: float, within_s: float) -> list[float]:
    """Return each stream's longest pause within `within_s` after a fault, less the step that every token needs."""
    return [(each.longest_pause_s(struck_s, struck_s + within_s) - step_s) * 1000 for each in streams]


async def judged_row(
    found: Mapping[str, Any],
    running: Stage,
    traffic: Traffic,
    struck_s: Sequence[float],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a row of the table: `found`, counts of all streams, pauses of the streams that ran at a fault, and `more`.

    Streams with a broken connection are left out of the pauses.
    """
    hit = [(at_s, each) for at_s in struck_s for each in in_flight(traffic.answers, at_s)]
    pauses = [
        pause
        for at_s, each in hit
        if each.failure is None
        for pause in pauses_ms([each], at_s, step_s=running.step_s, within_s=_AFTERMATH_S)
    ]
    return {
        **found,
        **judged(traffic.answers, traffic.reference),
        "in_flight_at_faults": len(hit),
        **spread("added_pause_ms", pauses),
        **more,
        "left_over": await running.left_over(),
    }


def spread(name: str, samples: Sequence[float], digits: int = 1) -> dict[str, Any]:
    """Return median, 99th percentile, maximum and samples; `recovery_s` gives `recovery_p50_s` and so on."""
    stem, _, unit = name.rpartition("_")
    found = {"p50": percentile(samples, 50), "p99": percentile(samples, 99), "max": max(samples, default=None)}
    rounded = {f"{stem}_{key}_{unit}": None if value is None else round(value, digits) for key, value in found.items()}
    return rounded | {f"{name}{SAMPLES}": [round(sample, digits) for sample in samples]}


def without_samples(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line without the lists of samples, for printing."""
    return {name: value for name, value in line.items() if not name.endswith(SAMPLES)}
