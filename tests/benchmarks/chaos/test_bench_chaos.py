"""How answers are judged; the faults themselves: tests/deployments/test_failover.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import psutil
import pytest

from benchmarks.chaos import at_random
from benchmarks.chaos.stage import Size, Stage
from benchmarks.chaos.traffic import KINDS, mixed, with_stop
from benchmarks.chaos.verdict import by_kind, is_bad, judged, outcomes, pauses_ms, spread
from benchmarks.harness.answer import Answer
from benchmarks.harness.http_call import Target
from benchmarks.harness.service import Service

ERROR = {"message": "gone", "type": "server_error", "code": "unavailable"}


def answered(name: str, text: str, events_s: Sequence[float] = ()) -> Answer:
    return Answer(
        0.0, name=name, begun_s=0.0, status=200, events_s=list(events_s), texts={0: text}, ended_s=9.0,
        finish_reasons={0: "length"}, num_reported_tokens=4, is_done=True,
    )  # fmt: skip


def test_wrong_answers_are_counted_by_what_is_wrong() -> None:
    reference = {"greedy 0": answered("greedy 0", "abcd")}
    answers = [answered("greedy 0", text) for text in ("abcd", "abd", "abccd", "abcx", "abce")]
    answers.append(Answer(0.0, name="greedy 0", begun_s=0.0, failure="timeout"))
    found = judged(answers, reference)
    assert (found["streams"], found["completed"]) == (6, 5)
    assert (found["lost"], found["repeated"], found["different"]) == (1, 1, 2)
    assert (found["malformed"], found["hung"], found["other_ends"]) == (1, 1, {"timeout": 1})
    assert by_kind(answers, reference) == {"greedy": {"asked": 6, "completed": 5, "wrong": 4}}


def test_the_pause_of_a_fault_is_the_longest_that_touches_its_aftermath() -> None:
    stream = answered("greedy 0", "abcd", events_s=[2.0, 2.1, 2.9, 3.0, 8.0])
    assert pauses_ms([stream], 2.5, step_s=0.1, within_s=0.4) == [pytest.approx(700)]
    assert pauses_ms([stream], 2.5, step_s=0.1, within_s=2.0) == [pytest.approx(4900)]
    assert pauses_ms([stream], 8.5, step_s=0.1, within_s=2.0) == [pytest.approx(-100)]
    found = spread("pause_ms", [1.0, 3.0])
    assert found.pop("pause_ms_samples") == [1.0, 3.0]
    assert found == {"pause_p50_ms": 2.0, "pause_p99_ms": 3.0, "pause_max_ms": 3.0}


def test_all_kinds_are_asked_and_a_stop_string_lies_on_the_way() -> None:
    requests = mixed(12, max_tokens=(10, 20))
    assert Counter(asked.kind for asked in requests) == dict.fromkeys(KINDS, 2)
    text = "some words that a model might well have said"
    [stop] = with_stop(requests[3], text).body["stop"]
    assert 0 < text.index(stop) < len(text) - len(stop)


def test_outcomes_are_what_clients_got_and_a_row_with_a_wrong_or_a_hung_one_is_bad() -> None:
    reference = {"greedy 0": answered("greedy 0", "abcd")}

    def broken(**ends: Any) -> Answer:
        return Answer(0.0, name="greedy 0", begun_s=0.0, **ends)

    fine = [
        answered("greedy 0", "abcd"),
        broken(status=503, error=ERROR),
        broken(status=200, error=ERROR, is_done=True),
        broken(status=200, failure="cut off: CutOff"),
        broken(failure="no connection"),
        broken(status=500, refusal=b"Internal Server Error"),
    ]
    found = outcomes(fine, reference)
    assert found == {
        "right": 1, "wrong": 0, "refused": 1, "ended": 1, "cut": 2, "by_proxy": 1, "hung": 0, "malformed": 0,
    }  # fmt: skip
    right = {"right": 3, "wrong": 0}
    line = {**judged(fine, reference), "outcomes": found, "after": right, "missing": [], "left_over": {"blocks": 0}}
    assert not is_bad(line)
    for bad in (answered("greedy 0", "abcx"), broken(status=200, failure="timeout")):
        assert is_bad(line | {"outcomes": outcomes([*fine, bad], reference)})
        assert is_bad(judged([*fine, bad], reference))
    for change in ({"left_over": {"blocks": 1}}, {"missing": ["ingress"]}, {"after": right | {"refused": 1}}):
        assert is_bad(line | change)


def test_a_seed_strikes_the_same_kinds_in_the_same_ways() -> None:
    first, again, other = (
        list(islice(at_random.strikes(Size(1, 1, seed).source("R14")), 200)) for seed in (1, 1, 2)
    )  # fmt: skip
    assert first == again != other
    assert {each.kind for each in first} == set(at_random.KINDS)
    assert {each.how.split()[0] for each in first} == {"kill", "SIGSTOP"}


PROGRAM = "import time; print(flush=True); time.sleep(600)"


def test_every_process_that_is_stopped_at_random_goes_on_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_random, "_QUIET_S", (0.0, 0.01))
    monkeypatch.setattr(at_random, "_STOPPED_S", (0.0, 0.5))
    titles = ["ray::ServeReplica:carousel:replica-chaos", "ray::ServeReplica:carousel:ingress", "ray::ProxyActor"]
    started = [
        subprocess.Popen([title, "-c", PROGRAM], executable=sys.executable, stdout=subprocess.PIPE) for title in titles
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        running = Stage(Service(Target.parse("http://127.0.0.1:1"), os.getpid()), num_replicas=1, step_s=0.0)
        assert at_random.numbers(running)["ingress"] == 1
        havoc = at_random._Havoc(running, Size(1, 1).source("test"))
        asyncio.run(havoc.go_on(1.0))
        killed = {int(made.split()[-1]) for made in havoc.made if "kill -9" in made}
        assert {each.pid for each in started if each.poll() is not None} <= killed
        for process in started:
            if process.pid in killed:
                process.wait()
            else:
                assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    finally:
        for process in started:
            process.kill()
            process.communicate()
