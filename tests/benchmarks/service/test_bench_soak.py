"""The soak finds nothing in a sound service, and what leaks, differs, is lost or grows."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from app.build import build_engine
from app.config import ApiConfig, EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Generate, Pooling, Request, TokenDelta
from app.text import Tokenizer
from app.usage import Used
from benchmarks.harness.answer import ask
from benchmarks.harness.http_call import Target
from benchmarks.service import tenants as tenants_module
from benchmarks.service.canaries import KINDS, Question, Secrets, heard
from benchmarks.service.hostile_requests import Tally, attack, hostile_requests
from benchmarks.service.soak import Sample, attack_figures, figures_of, is_bad, ledger_figures, main, process_figures
from benchmarks.service.tenants import FINE, Found, ItemResponse, Reply, Tenants
from tests.api.test_stored_responses import Gated, kept_by
from tests.benchmarks.conftest import Refusal
from tests.benchmarks.servers import Cutting, listening, served, simulated_service
from tests.kit.service import ADMIN_KEY, KEY, Service, bearer, client_of, entry, ring, say_likely
from tests.kit.service import served as with_batches

KEYS = {"one": "sk-one", "two": "sk-two", "three": "sk-three"}
# The others need a batch service, a place for tools, or processes that taste grammars.
KINDS_HERE = tuple(kind for kind in KINDS if kind not in ("batch", "choice", "schema", "tools"))


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_path))


@pytest.fixture(scope="module")
def engine(demo_path: Path) -> Iterator[AsyncEngine]:
    """Too little memory for all that may run."""
    config = {
        "model": {"path": str(demo_path), "batch_invariant": True},
        "cache": {"num_blocks": 60, "block_size": 16},
        "scheduler": {"max_running": 16},
        "speculation": {"method": "lookup"},
    }
    engine = build_engine(EngineConfig.model_validate(config))
    yield engine
    engine.shutdown()


@contextmanager
def service(engine: AsyncEngine, tokenizer: Tokenizer, generate: Generate, *, share_prefixes: bool) -> Iterator[str]:
    run = uuid.uuid4().hex  # tenants of its own: the engine, and what it has cached, is that of other tests too
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS.values()]
    keys = ring([{"name": f"{run}-{number}", "sha256": each} for number, each in enumerate(hashes)])
    of_model = {"name": "demo", "generate": generate, "pooling": Pooling.LAST, "authenticator": keys}
    with served(engine, tokenizer, ApiConfig(share_prefixes=share_prefixes), **of_model) as url:
        yield url


@pytest.fixture
def found_in(engine: AsyncEngine, tokenizer: Tokenizer) -> Callable[..., dict[str, Found]]:
    """What tenants find in a service over this `generate`, the engine's by default."""

    def run(
        generate: Generate | None = None, *, number: int, at_once: int = 16, share_prefixes: bool = False
    ) -> dict[str, Found]:
        async def main(url: str) -> dict[str, Found]:
            tenants = Tenants(Target.parse(url), KEYS, tokenizer, models=["demo"], kinds=KINDS_HERE, seed=5)
            free = asyncio.Semaphore(at_once)

            async def one(name: str) -> None:
                async with free:
                    await tenants.ask(tenants.next_question(name))

            await asyncio.gather(*(one(list(KEYS)[at % 3]) for at in range(number)))
            return tenants.found

        with service(engine, tokenizer, generate or engine.generate, share_prefixes=share_prefixes) as url:
            return asyncio.run(main(url))

    return run


def outcomes(tenants: dict[str, Found]) -> Counter[str]:
    return sum((each.outcomes for each in tenants.values()), Counter())


def test_in_a_sound_service_all_answers_are_right(
    found_in: Callable[..., dict[str, Found]], engine: AsyncEngine
) -> None:
    tenants = found_in(number=90)
    assert outcomes(tenants).keys() <= FINE, [each.details for each in tenants.values()]
    figures = figures_of(tenants, 0.0, 0.0, [])
    assert figures["sang"] > 0.9
    assert set(figures["own"]) == set(figures["searched"]) == set(KINDS_HERE)
    assert all(figures["own"].values()), "of every kind the search sees what is in it"
    assert sum(each.num_cached for each in tenants.values()) > 0
    assert engine.stats().total_preemptions > 0


def test_the_slowest_answers_are_told_with_the_kills_that_were_shortly_before_them() -> None:
    answers = [ItemResponse(at_s, took_s, "stream", "demo", 2) for at_s, took_s in ((50.0, 1.0), (150.0, 21.0))]
    kills = [(60.0, "replica"), (128.0, "batches"), (130.0, "replica"), (151.0, "replica")]
    found = figures_of({"one": Found(answered=answers)}, 0.0, 1.0, kills)["tenants"]["one"]
    assert found["late"] == 1
    assert [(each["took_s"], each["kills"]) for each in found["slowest"]] == [
        (21.0, [("batches", -1.0), ("replica", 1.0)]),
        (1.0, []),
    ]


def test_what_is_given_to_another_is_found(found_in: Callable[..., dict[str, Found]], engine: AsyncEngine) -> None:
    last: list[tuple[int, ...]] = [()]
    source = random.Random(1)

    async def leaky(request: Request) -> AsyncIterator[TokenDelta]:
        prompt, last[0] = last[0], request.prompt_token_ids
        if source.random() < 0.5 and prompt:
            request = replace(request, prompt_token_ids=prompt)
        async for delta in engine.generate(request):
            yield delta

    tenants = found_in(leaky, number=40)
    assert outcomes(tenants)["leaked"] > 5
    assert outcomes(tenants)["wrong"] > 0
    assert is_bad(_figures(tenants))


def test_cached_prefixes_of_others_are_found(found_in: Callable[..., dict[str, Found]]) -> None:
    # One by one: what was sent before is computed by then.
    assert outcomes(found_in(number=24, at_once=1, share_prefixes=True))["unexplained"] > 0
    assert outcomes(found_in(number=24, at_once=1))["unexplained"] == 0


def test_a_mark_is_found_in_any_text_and_belongs_to_one() -> None:
    secrets = Secrets(random.Random(3))
    mine, yours = secrets.new(1), secrets.new(2)
    assert secrets.owners_in(mine.question) == {1}
    assert secrets.owners_in(f'{{"words": "{" ".join(yours.words[2:5])}"}} apple stone river') == {2}
    assert secrets.owners_in(" ".join((*mine.words[:2], *yours.words[:2]))) == set()
    assert secrets.owners_in(mine.sentence + yours.sentence) == {1, 2}


def test_no_hostile_request_is_a_server_error_and_honest_ones_are_answered(demo_path: Path) -> None:
    some, again = (list(islice(hostile_requests(3), 200)) for _ in range(2))
    assert some == again
    assert {request.kind for request in some if request.is_cut} == {"cut_short", "broken_head", "stopped_chunks"}
    tally = Tally()

    async def main(target: Target) -> bool:
        body = {"prompt": [300, 301, 302], "max_tokens": 8, "ignore_eos": True, "stream": True}
        honest = target.request("completions", json.dumps(body).encode())
        attacking = asyncio.create_task(attack(target, some, tally, rate=200.0, at_once=64))
        answers = [await ask(target, honest, timeout_s=30) for _ in range(10)]
        await attacking
        return all(answer.has_succeeded for answer in answers)

    with simulated_service(demo_path, step_ms=5) as url:
        assert asyncio.run(main(Target.parse(url.replace("/v1", ""))))
    assert tally.server_errors == []
    assert (tally.by_kind.total(), len(tally.by_kind)) == (200, 8)
    assert tally.outcomes["400"] > 100


def _figures(tenants: dict[str, Found], **changes: Any) -> dict[str, Any]:
    processes: dict[str, Any] = {"growth": {}, "restarts": [], "left": {"running": 0}, "max_growth": 1.05}
    ledger = ledger_figures(tenants, {name: found.used for name, found in tenants.items()})
    return figures_of(tenants, 0.0, 1.0, []) | attack_figures(Tally()) | ledger | processes | changes


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([{"finish_reason": "stop"}], "DONE"),
        ([{"finish_reason": "stop"}, "[DONE]", "[DONE]"], "DONE"),
        ([{"finish_reason": None}, "[DONE]"], "no end"),
        ([{"finish_reason": "stop"}, {"finish_reason": "stop"}, "[DONE]"], "two"),
    ],
)
def test_a_stream_without_its_end_is_broken(events: list[Any], error: str, tokenizer: Tokenizer) -> None:
    asked = Tenants(Target.parse("http://h"), KEYS, tokenizer, models=["m"], kinds=["stream"], seed=1)
    reply = Reply()
    for each in events:
        chunk = {"choices": [{"index": 0, "delta": {"content": "a"}, **each}]} if isinstance(each, dict) else None
        reply.body(f"data: {json.dumps(chunk) if chunk else each}\n\n".encode(), at_s=0.0)
    with pytest.raises(ValueError, match=error):
        reply.heard(asked.next_question("one"))


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]}
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "stop"}]},
    ]
    assert heard([whole]) == heard(pieces)


def test_text_and_tool_calls_of_a_stream_are_heard_apart() -> None:
    """Which comes first depends on how many tokens an event has."""

    def event(**delta: object) -> dict[str, object]:
        return {"choices": [{"index": 0, "delta": delta}]}

    called = event(tool_calls=[{"index": 0, "function": {"name": "say", "arguments": '{"words": "a"}'}}])
    said = event(content='{"name"')
    assert heard([called, said]) == heard([said, called])


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (lambda lines: lines, "batch_right"),
        (lambda lines: lines[1:], "batch_wrong"),
        (lambda lines: [*lines, lines[0]], "batch_wrong"),
        (lambda lines: [lines[0].replace("yes", "no"), *lines[1:]], "batch_wrong"),
    ],
)
def test_a_line_that_is_lost_doubled_or_wrong_is_found(made: Any, outcome: str, tokenizer: Tokenizer) -> None:
    tenants = Tenants(Target.parse("http://127.0.0.1:1"), KEYS, tokenizer, models=["m"], seed=1)
    body = {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}
    lines = [json.dumps({"custom_id": f"0-{item}", "response": {"body": body}}) for item in range(2)]
    expected = {f"0-{item}": heard([body]) for item in range(2)}
    tenants.judge_batch("one", {"status": "completed"}, "\n".join(made(lines)), expected)
    assert tenants.found["one"].outcomes[outcome] == 1
    assert is_bad(_figures(tenants.found)) == (outcome == "batch_wrong")


@pytest.mark.parametrize(
    ("document", "used"),
    [
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, (3, 4)),
        ({"object": "list", "usage": {"prompt_tokens": 3, "total_tokens": 3}}, (3, 0)),
        ({"object": "batch", "usage": {"input_tokens": 3, "output_tokens": 4}}, (3, 4)),
        (
            {"object": "batch", "usage": {"input_tokens": 3, "output_tokens": 4}, "results": [
                {"response": {"usage": {"prompt_tokens": 3, "completion_tokens": 4, "pipeline": {"steps": [
                    {"kind": "cascade", "prompt_tokens": 3, "completion_tokens": 2},
                    {"kind": "cascade", "prompt_tokens": 3, "completion_tokens": 4},
                ]}}}},
                {"response": None, "error": {}},
            ]},
            (6, 6),
        ),
        ({"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}, (3, 4)),
        (
            {"type": "message_delta", "delta": {},
             "usage": {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 4}},
            (3, 4),
        ),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "pipeline": {"steps": [
                {"kind": "route"},
                {"kind": "generate", "prompt_tokens": 3, "completion_tokens": 2},
                {"kind": "generate", "prompt_tokens": 3, "completion_tokens": 4},
            ]}}},
            (6, 6),
        ),
    ],
    ids=["chat", "ranking", "list", "list of a pipeline", "response", "message", "pipeline"],
)  # fmt: skip
def test_what_an_answer_has_used_is_heard(document: dict[str, Any], used: tuple[int, int]) -> None:
    found = heard([document]).used
    assert (found.num_prompt_tokens, found.num_output_tokens) == used


@pytest.mark.parametrize("kind", ["whole", "stream", "n", "reply", "message", "batch"])
async def test_an_answer_of_a_pipeline_says_all_that_its_key_is_charged_for(
    tokenizer: Tokenizer, tmp_path: Path, kind: str
) -> None:
    keys = [entry(), entry(ADMIN_KEY, "root", admin=True)]
    pipelines = [{"name": "both", "steps": [{"kind": "ensemble", "models": ["small", "large"]}]}]
    names = ("small", "large")
    script = say_likely(tokenizer, "3 4", -0.1)
    service = Service(tokenizer, script, names=names, pipelines=pipelines, max_model_len=2000)
    target, tenant = Target.parse("http://h"), {"alice": KEY}
    tenants = Tenants(target, tenant, tokenizer, models=["small"], pipelines={"both": names}, kinds=[kind], seed=1)
    asked = next(each for each in _questions(tenants, "alice") if each.body["model"] == "both")
    async with with_batches(service, tmp_path, keys=keys) as app, client_of(app) as client:
        answer = await client.post(f"/v1/{asked.endpoint}", json=asked.body, headers=bearer())
        told = await client.get("/admin/keys", headers=bearer(ADMIN_KEY))
    reply = Reply()
    reply.body(answer.content, at_s=0.0)
    used = reply.heard(asked).used
    num_prompt = sum(len(request.prompt_token_ids) for request in service.generate.requests)
    assert used.num_prompt_tokens == num_prompt // (3 if kind == "n" else 1)  # n samples share a prompt
    assert used.num_tokens == told.json()["data"][0]["tokens"]


def test_a_ledger_with_more_than_all_tries_or_less_than_the_answers_is_found() -> None:
    def used(prompt: int, output: int) -> Used:
        return Used(num_prompt_tokens=prompt, num_output_tokens=output)

    tenants = {"one": Found(Counter(right=1), used=used(100, 50), may_have_used=used(10, 5))}
    for charged, twice, missing in (
        (used(100, 50), 0, 0),
        (used(110, 55), 0, 0),
        (used(111, 55), 1, 0),
        (used(100, 60), 5, 0),
        (used(98, 60), 5, 2),
        (used(100, 49), 0, 1),
    ):
        figures = ledger_figures(tenants, {"one": charged, "attacker": used(999, 999)})
        assert (figures["ledger"]["one"]["twice"], figures["ledger"]["one"]["missing"]) == (twice, missing)
        assert is_bad(_figures(tenants) | figures) == bool(twice or missing)


def test_server_errors_count_where_there_was_an_ingress() -> None:
    tally = Tally(server_errors=[{"at_s": at_s} for at_s in (1.0, 5.0, 9.0)])
    found = attack_figures(tally, [(4.0, 6.0)])["attack"]["server_errors"]
    assert [each["at_s"] for each in found] == [1.0, 9.0]


def test_what_cannot_be_killed_is_refused(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(main, "--kill", "replica,ingres")
    assert said == "error: --kill: there is no process 'ingres'; did you mean ingress?"
    monkeypatch.setenv("PATH", "")
    assert refusal(main, "--kill", "head").startswith("error: --kill head: needs ")


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("may_break", [True, False])
def test_tenants_go_on_where_connections_break(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool, may_break: bool
) -> None:
    for name in ("_RETRY_S", "_AFTER_REFUSAL_S"):
        monkeypatch.setattr(tenants_module, name, 0.0)
    text = " ".join(str(number) for number in range(40))
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False)) + 1
    gate = Gated(tokenizer, text)
    gate.open()

    async def ask_four() -> Found:
        async with with_batches(kept_by(tokenizer, gate), tmp_path) as app, listening(Cutting(app, 9)) as url:
            kinds = ["stream", "reply"]
            tenants = Tenants(Target.parse(url), KEYS, tokenizer, models=["demo"], kinds=kinds, seed=5, keeps=keeps)
            tenants.may_break = may_break
            for asked in islice((each for each in _questions(tenants) if each.is_kept == keeps), 4):
                await tenants.ask(asked)
            return tenants.found["one"]

    found = asyncio.run(ask_four())
    if keeps:
        assert found.outcomes["right"] == 4, found.details
        assert found.outcomes["gone_on"] == 9
        assert len(gate.requests) == 4, "each was computed once"
        assert (found.used.num_output_tokens, found.may_have_used) == (4 * num_tokens, Used())
    elif may_break:
        assert found.outcomes["right"] == 4, found.details
        assert found.outcomes["sent_again"] == len(gate.requests) - 4 == 9
        assert found.may_have_used.num_output_tokens > 0
    else:
        assert found.outcomes["cut_off"] == 4
        assert is_bad(_figures({"one": found}))


def _questions(tenants: Tenants, name: str = "one") -> Iterator[Question]:
    while True:
        yield tenants.next_question(name)


def test_memory_counts_by_quarters_and_new_processes_when_they_are_a_minute_old() -> None:
    title = "ray::ServeReplica:carousel:ingress"
    steady = [Sample(float(at), 1, title, 100.0 + at // 100, 10, 5) for at in range(0, 400, 5)]
    young = [Sample(float(at), 2, title, 900.0, 10, 5) for at in range(300, 355, 5)]
    figures = process_figures([*steady, *young], 0.0, 400.0)
    assert figures["memory_mib"][title] == [100.0, 101.0, 102.0, 103.0]
    assert figures["growth"][title] == pytest.approx(1.02, abs=0.001)
    fine = _figures({"one": Found(Counter(right=1))}) | figures
    assert not is_bad(fine)
    for changes in ({"growth": {title: 1.06}}, {"restarts": ["ingress"]}, {"left": {"running": 1}}, {"sang": 0.5}):
        assert is_bad(fine | changes)
