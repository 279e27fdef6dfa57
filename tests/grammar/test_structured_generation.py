"""The bundled model writing by grammars, at temperature 1: alone, in a batch, preempted, and gone on with elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import pytest

from app.build import assemble, build_matchers, build_sync_engine
from app.config import CacheConfig, EngineConfig, SchedulerConfig
from app.engine.engine import Engine
from app.engine.matcher import Matchers
from app.engine.request import FinishReason, Grammar, GrammarKind, ModelInfo, Request, SamplingParams, Thought
from app.engine.speculation.drafter import Drafter, LookupDrafter
from app.model.matcher_preparer import MatcherPreparer
from app.text import Tokenizer
from tests.grammar.random_schemas import random_schema
from tests.kit.engine import EagerModelDrafter, Outcome

CONFIG = EngineConfig(scheduler=SchedulerConfig(max_running=16))
LISTS = {"type": "array", "items": {"enum": ["one", "two", 3, None]}, "minItems": 12, "maxItems": 20}
PATTERN = r"[A-Z][a-z]{2,12}( [a-z]{2,12}){1,6}\."


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_sync_engine(CONFIG)


@pytest.fixture(scope="module")
def matchers(engine: Engine) -> Iterator[Matchers]:
    made = build_matchers(CONFIG, engine.model_info)
    yield made
    made.close()


def asking(name: str, kind: GrammarKind, text: str, *, seed: int = 1, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 900, "grammar": Grammar(kind, text), "seed": seed} | sampling)
    return Request(request_id=name, prompt_token_ids=(2, 40, 50, 60, 3), sampling=params)


def for_schema(name: str, schema: dict[str, Any], **sampling: Any) -> Request:
    return asking(name, GrammarKind.JSON_SCHEMA, json.dumps(schema), **sampling)


def answers(engine: Engine, matchers: Matchers, requests: Sequence[Request], *, max_steps: int = 100_000) -> Outcome:
    outcome = Outcome()
    for request in requests:
        engine.add(request, matcher=matchers.matcher_of(request).result())
    for _ in range(max_steps):
        if not engine.has_work:
            break
        outcome.book(engine.step())
    return outcome


def texts(outcome: Outcome, tokenizer: Tokenizer) -> dict[str, str]:
    return {name: tokenizer.decode(token_ids) for name, token_ids in outcome.token_ids.items()}


class EagerDrafter(LookupDrafter):
    """Drafts whatever it takes."""

    def begin(self, num_sequences: int) -> bool:
        self._least_chance = 0.05
        return True


def drafting_with_a_model(model_info: ModelInfo) -> Drafter:
    """The same model as a draft model, with KV memory of its own."""
    return EagerModelDrafter(build_sync_engine(CONFIG).runner, max_drafts=4, max_model_len=2048, model_info=model_info)


@pytest.mark.parametrize(
    "make_drafter",
    [lambda model_info: EagerDrafter(6), drafting_with_a_model],
    ids=["forced_and_lookups", "draft_model"],
)
def test_drafts_change_no_document(
    make_drafter: Callable[[ModelInfo], Drafter], engine: Engine, matchers: Matchers
) -> None:
    drafting = assemble(
        CONFIG.scheduler, CONFIG.cache, num_blocks=engine.stats().num_blocks, runner=engine.runner,
        model_info=engine.model_info, drafter=make_drafter(engine.model_info),
    )  # fmt: skip
    thought = Thought(begin="<t>", end="</t>", is_open=True, max_tokens=12)
    schemas = [for_schema(f"{seed}", random_schema(seed), max_tokens=160, seed=seed) for seed in range(8)]
    others = [
        asking("regex", GrammarKind.REGEX, PATTERN, repetition_penalty=1.2),
        for_schema("list", LISTS, frequency_penalty=0.1, logprobs=1),
        asking("chosen", GrammarKind.CHOICE, json.dumps(["one story", "one stone"]), min_tokens=3),
        for_schema("thinking", LISTS, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(LISTS), thought=thought)),
    ]
    expected, found = (answers(each, matchers, [*schemas, *others]) for each in (engine, drafting))
    engine.clear_prefix_cache()  # both have the same KV memory
    assert found.token_ids == expected.token_ids
    assert found.reasons == expected.reasons
    assert found.logprobs == expected.logprobs
    assert drafting.stats().total_accepted_tokens > 100


def test_random_schemas_give_valid_documents(engine: Engine, matchers: Matchers, tokenizer: Tokenizer) -> None:
    schemas = {f"{seed}": random_schema(seed) for seed in range(40)}
    outcome = answers(engine, matchers, [for_schema(name, schema) for name, schema in schemas.items()])
    assert set(outcome.reasons.values()) == {FinishReason.STOP}
    for name, text in texts(outcome, tokenizer).items():
        jsonschema.validate(json.loads(text), schemas[name], format_checker=jsonschema.FormatChecker())


def test_a_regular_expression_is_matched_in_full(engine: Engine, matchers: Matchers, tokenizer: Tokenizer) -> None:
    outcome = answers(engine, matchers, [asking(f"{n}", GrammarKind.REGEX, PATTERN, seed=n) for n in range(16)])
    written = texts(outcome, tokenizer)
    assert all(re.fullmatch(PATTERN, text) for text in written.values()), written
    assert len(set(written.values())) > 12
    assert set(outcome.reasons.values()) == {FinishReason.STOP}


def test_what_is_greedy_keeps_to_its_grammar_too(engine: Engine, matchers: Matchers, tokenizer: Tokenizer) -> None:
    request = asking("greedy", GrammarKind.CHOICE, '["positive", "negative"]', temperature=0.0)
    assert texts(answers(engine, matchers, [request]), tokenizer)["greedy"] in ("positive", "negative")


def test_neighbours_without_a_grammar_write_what_they_would_alone(engine: Engine, matchers: Matchers) -> None:
    free = replace(asking("free", GrammarKind.REGEX, "x"), sampling=SamplingParams(max_tokens=40, seed=3))
    alone = answers(engine, matchers, [free])
    beside = answers(engine, matchers, [free, *(for_schema(f"{n}", random_schema(n)) for n in range(8))])
    assert beside.token_ids["free"] == alone.token_ids["free"]


def test_in_a_batch_it_writes_what_it_writes_alone(engine: Engine, matchers: Matchers) -> None:
    requests = [for_schema(f"{n}", random_schema(n), seed=n) for n in range(8)]
    together = answers(engine, matchers, requests)
    for request in requests[::2]:
        alone = answers(engine, matchers, [request])
        assert alone.token_ids[request.request_id] == together.token_ids[request.request_id]


def test_masks_found_beside_the_model_are_those_found_in_their_turn(
    engine: Engine, matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop tokens and bans too; some end on the way, and their places are taken."""
    requests = [for_schema(f"{n}", random_schema(n), seed=n, min_tokens=n % 3) for n in range(14)]
    requests += [asking(f"regex-{n}", GrammarKind.REGEX, PATTERN, seed=n, stop_token_ids=(100 + n,)) for n in range(8)]
    beside = answers(engine, matchers, requests)
    monkeypatch.setattr(MatcherPreparer, "preparing", lambda *_: nullcontext())
    in_turn = answers(engine, matchers, requests)
    assert (beside.token_ids, beside.reasons) == (in_turn.token_ids, in_turn.reasons)


def test_preempted_it_writes_the_same(engine: Engine, matchers: Matchers) -> None:
    requests = [asking(f"{n}", GrammarKind.REGEX, PATTERN, seed=n) for n in range(8)]
    expected = answers(engine, matchers, requests)
    tight = build_sync_engine(CONFIG.model_copy(update={"cache": CacheConfig(num_blocks=40, block_size=16)}))
    requests = [replace(each, sampling=replace(each.sampling, max_tokens=300)) for each in requests]
    outcome = answers(tight, matchers, [*requests, *(long_text(n) for n in range(8))])
    assert tight.stats().total_preemptions > 0
    assert {n: outcome.token_ids[n] for n in expected.token_ids} == expected.token_ids


def long_text(number: int) -> Request:
    sampling = SamplingParams(max_tokens=120, seed=number, ignore_eos=True)
    return Request(request_id=f"long-{number}", prompt_token_ids=(5, 6, 7), sampling=sampling, priority=-1)


@pytest.mark.parametrize("thought", [None, Thought("<think>", "</think>", is_open=True, max_tokens=5)])
def test_another_engine_goes_on_exactly(engine: Engine, matchers: Matchers, thought: Thought | None) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(LISTS), thought=thought)
    request = for_schema("whole", LISTS, grammar=grammar)
    whole = answers(engine, matchers, [request]).token_ids["whole"]
    assert len(whole) > 20
    resumed = {
        f"after {size}": replace(request, request_id=f"after {size}", generated_token_ids=tuple(whole[:size]))
        for size in (1, 2, 7, 20)
    }
    found = answers(engine, matchers, [*resumed.values()]).token_ids
    assert found == {name: whole[len(each.generated_token_ids) :] for name, each in resumed.items()}


def test_max_tokens_may_cut_it(engine: Engine, matchers: Matchers) -> None:
    outcome = answers(engine, matchers, [for_schema("cut", random_schema(3), max_tokens=5)])
    assert outcome.reasons["cut"] is FinishReason.LENGTH
    assert len(outcome.token_ids["cut"]) == 5


def test_ignore_eos_and_min_tokens_put_the_end_off_but_not_for_ever(
    engine: Engine, matchers: Matchers, tokenizer: Tokenizer
) -> None:
    requests = [
        asking("short", GrammarKind.REGEX, "ab", ignore_eos=True, min_tokens=50),
        asking("bounded", GrammarKind.REGEX, "a{1,30}", ignore_eos=True),
        asking("min", GrammarKind.REGEX, "[0-9]{1,30}", min_tokens=8),
    ]
    outcome = answers(engine, matchers, requests)
    written = texts(outcome, tokenizer)
    assert (written["short"], written["bounded"]) == ("ab", "a" * 30)
    assert len(outcome.token_ids["min"]) > 8
    assert set(outcome.reasons.values()) == {FinishReason.STOP}


def test_a_stop_token_is_drawn_only_where_the_text_may_end(
    engine: Engine, matchers: Matchers, tokenizer: Tokenizer
) -> None:
    stops = tuple(range(4))
    wanted = {"stop_token_ids": stops, "logit_bias": tuple((token_id, 100.0) for token_id in stops)}
    requests = [asking(f"{n}", GrammarKind.REGEX, "[0-9]{3,9}", seed=n, **wanted) for n in range(8)]
    outcome = answers(engine, matchers, requests)
    assert {token_ids[-1] for token_ids in outcome.token_ids.values()} <= set(stops)
    assert all(re.fullmatch("[0-9]{3,9}", text) for text in texts(outcome, tokenizer).values())


def test_banned_words_are_not_written(engine: Engine, matchers: Matchers, tokenizer: Tokenizer) -> None:
    def word(number: int, **sampling: Any) -> Request:
        params = SamplingParams(max_tokens=44, seed=number, ignore_eos=True, **sampling)
        return Request(request_id=f"{number}", prompt_token_ids=(5, 6, 7), sampling=params)

    free = answers(engine, matchers, [word(n) for n in range(16)])
    pairs = [tuple(token_ids[at : at + 2]) for token_ids in free.token_ids.values() for at in range(0, 40, 8)]
    singles = [(token_ids[5],) for token_ids in free.token_ids.values()]
    bad = (*pairs, *singles)
    outcome = answers(engine, matchers, [word(n, bad_words=bad) for n in range(16)])
    for token_ids in outcome.token_ids.values():
        followed = set(pairwise(token_ids)) | {(token_id,) for token_id in token_ids}
        assert not followed & set(bad)


def test_only_allowed_tokens_are_drawn(engine: Engine, matchers: Matchers) -> None:
    allowed = (21, 22, 762)
    bias = ((762, -100.0),)  # as good as out of the question, but for its being allowed
    sampling = SamplingParams(max_tokens=80, allowed_token_ids=allowed, logit_bias=bias, seed=1, temperature=2.0)
    some = Request(request_id="some", prompt_token_ids=(5, 6, 7), sampling=sampling)
    greedy = replace(some, request_id="greedy", sampling=replace(sampling, temperature=0.0))
    outcome = answers(engine, matchers, [some, greedy])
    assert set(outcome.token_ids["some"]) == {21, 22}
    assert set(outcome.token_ids["greedy"]) <= {21, 22}


def tagged(trigger: str) -> str:
    """Free text; behind the trigger stands a number in brackets."""
    tag = {"trigger": trigger, "is_opening": False, "content": [{"schema": 0}, "]"], "is_last": False}
    return json.dumps({"schemas": [{"schema": {"enum": [1, 22]}, "is_lenient": False}], "tags": [tag]})


def test_free_text_is_what_it_is_without_a_grammar(engine: Engine, matchers: Matchers) -> None:
    def free(number: int, **sampling: Any) -> Request:
        params = SamplingParams(max_tokens=60, seed=number, temperature=(0.0, 1.0, 2.0)[number % 3], **sampling)
        return Request(request_id=f"{number}", prompt_token_ids=(2, 40 + number, 50, 60, 3), sampling=params)

    grammar = Grammar(GrammarKind.TAGS, tagged("<tool_call>"))
    alone = answers(engine, matchers, [free(n) for n in range(12)])
    beside = answers(engine, matchers, [free(n, grammar=grammar) for n in range(12)])
    assert beside.token_ids == alone.token_ids
    assert beside.reasons == alone.reasons


def test_what_follows_a_trigger_keeps_to_its_form(engine: Engine, matchers: Matchers, tokenizer: Tokenizer) -> None:
    requests = [asking(f"{n}", GrammarKind.TAGS, tagged("e"), seed=n, max_tokens=60, temperature=0.5) for n in range(8)]
    outcome = answers(engine, matchers, requests)
    written = texts(outcome, tokenizer)
    assert sum(text.count("e") for text in written.values()) > 8
    for name, text in written.items():
        was_cut = outcome.reasons[name] is FinishReason.LENGTH
        complete = re.sub("e[^e]{0,3}$", "", text) if was_cut else text
        assert re.fullmatch(r"([^e]|e(1|22)\])*", complete), text
    resumed = [replace(each, generated_token_ids=tuple(outcome.token_ids[each.request_id][:17])) for each in requests]
    rest = {name: token_ids[17:] for name, token_ids in outcome.token_ids.items()}
    assert answers(engine, matchers, resumed).token_ids == rest
