"""Measures /v1/decisions, questions with probabilities: `python -m benchmarks.service.decisions --model PATH`.

Serves a model and runs two experiments. Prints one line of JSON:

    together     questions about one random text, asked in two ways in turn, each time about another text: one call of
                 /v1/decisions, or one concurrent chat for each question with one token and log-probabilities. Reports
                 the computed prompt tokens, the seconds until the last answer, and questions a second
    calibration  seeded questions that code can answer: which number is larger, and which word is in a list. For all
                 questions and for each kind: the share of right answers, the Brier score and the expected calibration
                 error (ten bins) of the given probability, and the Brier score of always answering the share of yes;
                 for all questions together, the mean mass of the labels

`--plot` draws the bins: the share of questions where yes was right, over the probability of yes. It needs matplotlib.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.http_call import Target, call
from benchmarks.harness.service import Service, application, service
from benchmarks.harness.turns import median_of_ratios, turns
from benchmarks.service.tenants import Reply

_NAME = "decides"
_WORDS = "river stone lamp green paper quiet morning bread window seven market sister letter garden winter road".split()
_PER_CALL, _BINS = 20, 10


@dataclass(frozen=True, slots=True)
class Fact:
    """A statement about a text, and whether it is true."""

    kind: str
    text: str
    statement: str
    is_true: bool


def facts(number: int, seed: int) -> list[Fact]:
    """Return `number` facts: half of each kind are true."""
    source, found = random.Random(seed), list[Fact]()
    for place in range(number):
        is_true = place % 4 < 2
        if place % 2:
            low, high = sorted(source.sample(range(10, 1000), 2))
            first, second = (high, low) if is_true else (low, high)
            text = f"Anna has {first} coins and Ben has {second} coins."
            found.append(Fact("numbers", text, "Does Anna have more coins than Ben?", is_true))
        else:
            *listed, other = source.sample(_WORDS, 7)
            asked = source.choice(listed) if is_true else other
            found.append(Fact("lists", f"The list: {', '.join(listed)}.", f"Is the word {asked} in the list?", is_true))
    return found


def calibration(given: Sequence[tuple[Fact, float]]) -> dict[str, Any]:
    """Return the figures for probabilities of yes. A bin is [mean probability, share of yes, number of questions]."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for fact, probability in given:
        bins[min(int(probability * _BINS), _BINS - 1)].append((probability, fact.is_true))
    rows = [
        (statistics.fmean(each for each, _ in some), statistics.fmean(is_true for _, is_true in some), len(some))
        for some in bins
        if some
    ]
    share = statistics.fmean(fact.is_true for fact, _ in given)
    return {
        "questions": len(given),
        "right": round(statistics.fmean((probability > 0.5) == fact.is_true for fact, probability in given), 4),
        "brier": round(statistics.fmean((probability - fact.is_true) ** 2 for fact, probability in given), 4),
        "brier_of_share": round(share * (1 - share), 4),
        "calibration_error": round(sum(abs(mean - yes) * number for mean, yes, number in rows) / len(given), 4),
        "bins": [[round(mean, 3), round(yes, 3), number] for mean, yes, number in rows],
    }


def measured(given: argparse.Namespace) -> dict[str, Any]:
    if given.plot is not None and find_spec("matplotlib") is None:
        raise BenchmarkError("--plot needs matplotlib: pip install -c constraints.txt -e '.[plots]'")
    engine: dict[str, Any] = {"model": {"path": given.model}}
    with service(application(_NAME, engine)) as running:
        figures = {"together": asyncio.run(_together(running, given))} if given.rounds else {}
        if given.facts:
            figures["calibration"] = asyncio.run(_calibrated(running, given))
    return figures


# ---------------------------------------------------------------------- together


async def _together(running: Service, given: argparse.Namespace) -> dict[str, Any]:
    source = random.Random(given.seed)
    found: dict[str, list[dict[str, float]]] = {"decisions": [], "chats": []}
    for number, way in turns(list(found), rounds=given.rounds):
        text = " ".join(source.choices(_WORDS, k=given.words))
        questions = [f"Is the word {source.choice(_WORDS)} in it {place} times?" for place in range(given.questions)]
        ask = _by_decisions if way == "decisions" else _by_chats
        began_s = time.perf_counter()
        num_prompt, num_cached = await ask(running.target, text, questions)
        seconds = time.perf_counter() - began_s
        found[way].append(
            {
                "prompt_tokens": num_prompt,
                "computed_tokens": num_prompt - num_cached,
                "seconds": round(seconds, 3),
                "questions_per_s": round(len(questions) / seconds, 2),
            }
        )
        tell(f"round {number}, {way}: {found[way][-1]}")
    names = ("computed_tokens", "seconds")
    ratios = {
        name: median_of_ratios(*([each[name] for each in found[way]] for way in ("chats", "decisions")))
        for name in names
    }
    return {**found, "chats_over_decisions": ratios}


async def _by_decisions(target: Target, text: str, questions: Sequence[str]) -> tuple[int, int]:
    """Return the number of tokens of all prompts, and the number of cached tokens among them."""
    asked = [{"type": "predicate", "instructions": question} for question in questions]
    usage = (await _answer(target, "decisions", {"input": text, "questions": asked}))["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


async def _by_chats(target: Target, text: str, questions: Sequence[str]) -> tuple[int, int]:
    bodies = [
        {
            "messages": [{"role": "user", "content": f"{text}\n\nQuestion: {question}\n\nAnswer with Yes or No."}],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
        for question in questions
    ]
    answers = await asyncio.gather(*[_answer(target, "chat/completions", body) for body in bodies])
    usages = [each["usage"] for each in answers]
    num_cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    return sum(each["prompt_tokens"] for each in usages), num_cached


# ---------------------------------------------------------------------- calibration


async def _calibrated(running: Service, given: argparse.Namespace) -> dict[str, Any]:
    asked = facts(given.facts, given.seed)
    found, masses = list[tuple[Fact, float]](), list[float]()
    for start in range(0, len(asked), _PER_CALL):
        some = asked[start : start + _PER_CALL]
        answers = await asyncio.gather(*[_judged(running.target, fact) for fact in some])
        for fact, (probability, mass) in zip(some, answers, strict=True):
            found.append((fact, probability))
            masses.append(mass)
        tell(f"{len(found):,} of {len(asked):,} questions")
    kinds = {kind: [each for each in found if each[0].kind == kind] for kind in ("numbers", "lists")}
    figures = {"all": calibration(found), **{kind: calibration(some) for kind, some in kinds.items() if some}}
    if given.plot is not None:
        _draw(figures, given.plot)
    return figures | {"mean_mass": round(statistics.fmean(masses), 4)}


async def _judged(target: Target, fact: Fact) -> tuple[float, float]:
    """Return the probability of yes and the mass of both labels, which is derived from the question as a choice."""
    questions: list[dict[str, Any]] = [{"type": "predicate", "instructions": fact.statement}]
    questions.append({"type": "choice", "instructions": fact.statement, "choices": [{"value": "yes"}, {"value": "no"}]})
    predicate, choice = (await _answer(target, "decisions", {"input": fact.text, "questions": questions}))["answers"]
    largest = max(each["probability"] for each in choice["probabilities"])
    return predicate["probability"], choice["confidence"] / largest


def _draw(figures: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """Plot the share of yes over the mean probability of each bin, by kind; a dot is as large as its bin."""
    from matplotlib.figure import Figure  # imported here because matplotlib is an optional dependency

    figure = Figure(figsize=(4.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for kind, found in figures.items():
        if kind != "all":
            means, shares, numbers = zip(*found["bins"], strict=True)
            axes.scatter(means, shares, s=[4 + 200 * number / found["questions"] for number in numbers], label=kind)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability of yes", ylabel="share in which yes was right")
    axes.legend(loc="upper left")
    figure.savefig(path)


# ---------------------------------------------------------------------- calls


async def _answer(target: Target, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
    reply = Reply()
    await call(target, target.request(endpoint, {"model": _NAME, **body}), reply)
    if reply.status != 200:
        raise BenchmarkError(f"{endpoint} was answered with {reply.status}: {reply.data[:300].decode()}")
    return reply.json


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measured, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("service.decisions", __doc__)
    parser.add_argument("--model", default="models/demo", metavar="PATH")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of `together`; 0: none")
    parser.add_argument("--questions", type=positive, default=32, metavar="N")
    parser.add_argument("--words", type=positive, default=1500, metavar="N", help="words of the text")
    parser.add_argument("--facts", type=int, default=400, metavar="N", help="calibration questions; 0: none")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
