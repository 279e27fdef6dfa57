"""Cases: their files are well formed, each check knows a right answer from a wrong one, and a service is asked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from uvicorn.config import HTTP_PROTOCOLS

from benchmarks.cases.__main__ import main, read_cases
from benchmarks.cases.checks import CHECKS, problems
from benchmarks.cases.exchange import Got
from tests.benchmarks.conftest import Refusal
from tests.benchmarks.servers import simulated_service

PROJECT = Path(__file__).parents[2]
ASKED = ("--only", "http10-stream", "--only", "upgrade-h2c", "--only", "auth-two-headers/same")
JSON = {"content-type": "application/json"}


def names_of_checks(expected: Mapping[str, Any]) -> Iterator[str]:
    for name, wanted in expected.items():
        yield name
        if name == "one_of":
            for each in wanted:
                yield from names_of_checks(each)


def test_every_case_has_a_request_and_what_is_right_or_names_the_test_that_has_it() -> None:
    cases = read_cases()
    assert len({case.id for case in cases}) == len(cases) > 150
    for case in cases:
        assert case.source, case.id
        assert case.symptom, case.id
        assert case.right, case.id
        assert bool(case.request) == bool(case.expect) == (not case.elsewhere), case.id
        assert set(names_of_checks(case.expect)) <= CHECKS.keys(), case.id
        assert case.request.get("path", "/").startswith("/"), case.id
        path, _, name = case.elsewhere.partition(": ")
        if name:
            assert f"def {name}(" in (PROJECT / path).read_text(), case.id


CHAT = {"choices": [{"text": "a1"}, {"text": "a2"}], "usage": {"total": 3}}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"status": [200]}, {"status": [400, 404]}),
        ({"has": {"choices.1.text": "a2"}}, {"has": {"choices.2.text": "a2"}}),
        ({"matches": {"choices.*.text": r"a\d"}}, {"matches": {"choices.*.text": "a1"}}),
        ({"begins": {"choices.0.text": "a"}}, {"begins": {"choices.0.text": "b"}}),
        ({"at_most": {"usage.total": 3}}, {"at_most": {"usage.total": 2}}),
        ({"absent": ["id"]}, {"absent": ["usage"]}),
        ({"header": {"content-type": "json"}}, {"header": {"x-other": "json"}}),
        ({"no_header": ["x-other"]}, {"no_header": ["content-type"]}),
        ({"one_of": [{"status": [400]}, {"absent": ["id"]}]}, {"one_of": [{"status": [400]}, {"absent": ["usage"]}]}),
        (
            {"same_as": {"request": {"path": "/same"}, "here": "usage.total", "there": "usage.total"}},
            {"same_as": {"request": {"path": "/same"}, "here": "usage.total", "there": "choices.0.text"}},
        ),
    ],
)
def test_a_check_knows_a_right_answer_from_a_wrong_one(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    got = Got(200, JSON, json.dumps(CHAT))
    assert problems(right, got, lambda _: got) == []
    [problem] = problems(wrong, got, lambda _: got)
    assert problem


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (Got(500, JSON, "{}"), "status 500"),
        (Got(0, {}, "TimeoutError"), "status 0"),
        (Got(200, JSON, '{"a": Infinity}'), "Infinity is no JSON"),
    ],
)
def test_an_error_of_the_server_and_broken_json_are_never_right(got: Got, words: str) -> None:
    [problem] = problems({}, got, lambda _: got)
    assert words in problem


def test_lines_of_a_stream_are_whole_where_no_separator_of_unicode_is_in_them() -> None:
    def stream(text: str) -> Got:
        event = json.dumps({"text": text}, ensure_ascii=False)
        return Got(200, {"content-type": "text/event-stream"}, f": ping\n\nevent: a\ndata: {event}\n\ndata: [DONE]\n\n")

    assert problems({"lines": True, "has": {"events.0.text": "a"}}, stream("a"), stream) == []
    [problem] = problems({"lines": True}, stream("a\u2028b"), stream)
    assert "a reader of lines sees" in problem


def test_a_running_service_is_asked_and_what_fails_is_printed(
    demo_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["httptools"])  # uvicorn's own, which fails
    with simulated_service(demo_path, step_ms=0, name="demo") as url:
        assert main(["--url", url, *ASKED]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == {"cases": 3, "asked": 2, "failed": 2}, "one needs a key"
    assert "the header transfer-encoding is 'chunked'" in "".join(printed)
    _use_own_protocol()
    with simulated_service(demo_path, step_ms=0, name="demo") as url:
        assert main(["--url", url, *ASKED]) == 0
    assert json.loads(capsys.readouterr().out) == {"cases": 3, "asked": 2, "failed": 0}


def _use_own_protocol() -> None:
    # Not at the top: Serve reads its environment when it is imported, and the tests on a cluster set that later.
    with warnings.catch_warnings():
        # Ray 2.60 declares its pydantic fields in a way that pydantic 2.14 calls deprecated.
        warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`")
        from deployments.ray_internals import use_own_protocol
    use_own_protocol()


def test_a_case_that_is_not_there_is_refused(refusal: Refusal) -> None:
    words = refusal(main, "--only", "http10-streams")
    assert words == "error: there is no case 'http10-streams'; did you mean http10-stream?"
