"""Reasoning in answers: beside the text in chats, a block in messages, an item in responses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.async_engine import AsyncEngine
from app.engine.request import FinishReason, Request, Thought
from app.text import Tokenizer
from app.text.reasoning import MARKS
from app.text.tool_calls import FORMATS
from tests.api.test_messages import together
from tests.kit.service import CALL, Answer, Service, Step, calling, last, say, say_likely
from tests.text.tool_calls.templates import HERMES, tokenizer_with

THINK = MARKS[0]
# As Qwen 3's: without thinking the template writes an empty thought.
TEMPLATE = HERMES.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
).replace(
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}",
    "{%- if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
OPENING = HERMES.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")  # as DeepSeek R1's
TOOL = {"type": "function", "function": {"name": "f"}}
TEXT = "<think>\nHm, 3.\n</think>\n\nIt is 3."
NUM_TOKENS = len("<think>\nHm, 3.\n</think>")  # a token for each byte


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_with(TEMPLATE)


def thinking(tokenizer: Tokenizer, text: str = TEXT, reason: FinishReason = FinishReason.STOP) -> Service:
    return calling(tokenizer, text, reason, marks=THINK)


def message_of(answer: Answer) -> dict[str, Any]:
    [choice] = answer.json["choices"]
    return dict(choice["message"])


def streamed(answer: Answer) -> tuple[str, str]:
    """Reasoning and text of a streamed chat."""
    deltas = [choice["delta"] for chunk in answer.chunks for choice in chunk["choices"]]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    return "".join(delta.get("reasoning", "") for delta in deltas), "".join(
        delta.get("content", "") for delta in deltas
    )


def test_reasoning_stands_beside_the_text_of_a_chat(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer)
    answer = service.chat()
    message = message_of(answer)
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm, 3.", "Hm, 3.", "It is 3.")
    assert answer.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_TOKENS}
    stream = service.chat(stream=True, stream_options={"include_usage": True})
    assert streamed(stream) == ("Hm, 3.", "It is 3.")
    assert stream.chunks[-1]["usage"] == answer.json["usage"]


def test_a_model_that_marks_nothing_and_an_answer_without_reasoning_have_no_such_field(tokenizer: Tokenizer) -> None:
    plain = Service(tokenizer, say(tokenizer, TEXT), max_model_len=2000)
    assert message_of(plain.chat()) == {"role": "assistant", "content": TEXT, "refusal": None}
    assert message_of(thinking(tokenizer, "3").chat()) == {"role": "assistant", "content": "3", "refusal": None}


def test_a_template_may_begin_the_reasoning(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer_with(OPENING), "Hm.\n</think>\n3")
    message = message_of(service.chat())
    assert (message["reasoning"], message["content"]) == ("Hm.", "3")
    cut = message_of(thinking(tokenizer_with(OPENING), "Hm.", FinishReason.LENGTH).chat())
    assert (cut["reasoning"], cut["content"]) == ("Hm.", "")
    asked = {"role": "user", "content": "What is <think>\n"}  # what a client writes begins nothing
    assert message_of(thinking(tokenizer, "3").chat(messages=[asked])) == {
        "role": "assistant", "content": "3", "refusal": None,
    }  # fmt: skip


def test_thinking_is_switched_off_by_a_variable_of_the_template(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer, "3")
    service.chat(chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(service.request.prompt_token_ids).endswith("<|assistant|><think>\n\n</think>\n\n")


def test_a_last_message_may_go_on_within_its_reasoning(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>Well"}]
    message = message_of(thinking(tokenizer, ", 3.</think>3").chat(messages=messages, continue_final_message=True))
    assert (message["reasoning"], message["content"]) == (", 3.", "3")


def test_reasoning_of_earlier_turns_goes_to_the_template(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer)
    for name in ("reasoning", "reasoning_content"):
        service.chat(messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "3", name: "Hm."}])
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "3"}]
    messages = [
        {"role": "user", "content": "?"}, {"role": "assistant", "content": blocks}, {"role": "user", "content": "!"}
    ]  # fmt: skip
    service.call("POST", "/v1/messages", {"messages": messages, "max_tokens": 9})
    prompts = [tokenizer.decode(request.prompt_token_ids) for request in service.generate.requests]
    assert all("<|assistant|>\n<think>Hm.</think>3" in prompt.replace("|><", "|>\n<") for prompt in prompts), prompts


def test_tools_are_called_after_the_reasoning(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer, f"<think>{CALL}</think>\n{CALL}")
    message = message_of(service.chat(tools=[TOOL]))
    assert (message["reasoning"], message["content"], len(message["tool_calls"])) == (CALL, None, 1)
    reasoning, text = streamed(service.chat(tools=[TOOL], stream=True))
    assert (reasoning, text) == (CALL, "")


def test_stop_strings_and_log_probabilities(tokenizer: Tokenizer) -> None:
    says = say_likely(tokenizer, TEXT, -0.5)
    service = Service(tokenizer, says, reasoning_marks=THINK, max_model_len=2000)
    answer = service.chat(stop=["3"], logprobs=True)
    message = message_of(answer)
    assert (message["reasoning"], message["content"]) == ("Hm, 3.", "It is ")
    entries = answer.json["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "<think>\nHm, 3.\n</think>\n\nIt is 3"
    stream = service.chat(stop=["3"], logprobs=True, stream=True)
    assert streamed(stream) == ("Hm, 3.", "It is ")
    logprobs = [choice["logprobs"] for chunk in stream.chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert [entry for each in logprobs for entry in each["content"]] == entries


def test_it_is_a_block_of_a_message(tokenizer: Tokenizer) -> None:
    service, body = thinking(tokenizer), {"messages": [{"role": "user", "content": "?"}], "max_tokens": 99}
    message = service.call("POST", "/v1/messages", body).json
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm, 3.", "signature": ""}, {"type": "text", "text": "It is 3."},
    ]  # fmt: skip
    assert together(service.call("POST", "/v1/messages", body | {"stream": True}).events) | {"id": ""} == (
        message | {"id": ""}
    )


def test_it_is_an_item_of_a_response(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer)
    response = service.call("POST", "/v1/responses", {"input": "?"}).json
    reasoning, message = response["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm, 3."}])
    assert message["content"][0]["text"] == "It is 3."
    events = service.call("POST", "/v1/responses", {"input": "?", "stream": True}).body.decode().split("\n\n")[:-1]
    found = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm, 3."
    again = [{"role": "user", "content": "?"}, *response["output"], {"role": "user", "content": "And?"}]
    assert service.call("POST", "/v1/responses", {"input": again}).status == 200


@given(cuts=st.sets(st.integers(1, 80)))
@settings(max_examples=30, deadline=None)
def test_however_the_tokens_come_the_answer_is_the_same(tokenizer: Tokenizer, cuts: set[int]) -> None:
    text = f"<think>\n a <b> é \n</think>\n {CALL}"
    ids = tokenizer.encode(text, add_special_tokens=False)

    def script(request: Request) -> Iterable[Step]:
        yield from (ids[start:end] for start, end in pairwise([0, *sorted(c for c in cuts if c < len(ids)), len(ids)]))
        yield last(request, (), FinishReason.LENGTH)

    service = Service(tokenizer, script, tool_format=FORMATS["hermes"], reasoning_marks=THINK, max_model_len=2000)
    message = message_of(service.chat(tools=[TOOL]))
    assert (message["reasoning"], message["content"]) == ("a <b> é", None)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert streamed(service.chat(tools=[TOOL], stream=True)) == ("a <b> é", "")


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
THOUGHT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>Well"}]


@pytest.fixture(scope="module")
def computing(engine: AsyncEngine, demo_path: Path) -> Service:
    return Service(Tokenizer.load(str(demo_path)), generate=engine.generate, reasoning_marks=THINK, max_model_len=2000)


def reasoning_tokens(answer: Answer) -> int:
    return int(answer.json["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_reasoning_ends_after_its_budget_and_an_answer_in_its_form_follows(computing: Service, budget: int) -> None:
    fields = {
        "messages": THOUGHT, "continue_final_message": True, "max_tokens": 60, "seed": 1, "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA, "strict": True}},
    }  # fmt: skip
    answer = computing.chat(thinking_token_budget=budget, **fields)
    message = message_of(answer)
    assert json.loads(message["content"]).keys() == {"a"}
    assert max(budget, 1) <= reasoning_tokens(answer) <= budget + len("</think>")
    assert streamed(computing.chat(thinking_token_budget=budget, stream=True, **fields)) == (
        message.get("reasoning", ""), message["content"],
    )  # fmt: skip


def test_a_budget_without_a_form_leaves_the_answer_free(computing: Service) -> None:
    fields = {"messages": THOUGHT, "continue_final_message": True, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    free, bounded = computing.chat(**fields), computing.chat(thinking_token_budget=5, **fields)
    assert message_of(free)["content"] == "", "this model does not end its reasoning by itself"
    assert reasoning_tokens(free) == 40
    assert "</think>" not in message_of(bounded)["reasoning"]
    assert message_of(bounded)["content"]
    assert 5 <= reasoning_tokens(bounded) <= 5 + 8
    assert bounded.json["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("budget", [40, 1000])
def test_a_budget_of_max_tokens_or_more_bounds_nothing(computing: Service, budget: int) -> None:
    fields = {"messages": THOUGHT, "continue_final_message": True, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    answer = computing.chat(thinking_token_budget=budget, **fields)
    assert (reasoning_tokens(answer), answer.json["choices"][0]["finish_reason"]) == (40, "length")


def test_a_form_without_reasoning_begins_at_once(computing: Service) -> None:
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}}
    message = message_of(computing.chat(max_tokens=60, seed=1, thinking_token_budget=5, **fields))
    assert json.loads(message["content"]).keys() == {"a"}


ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
THINKING = {"type": "enabled", "budget_tokens": 5}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", ASKED | {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/chat/completions", ASKED | {"reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/chat/completions", ASKED | {"reasoning_effort": "none"}, None),
        ("/v1/responses", {"input": "?", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {"input": "?", "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ("/v1/messages", ASKED | {"thinking": THINKING}, "thinking.budget_tokens"),
        ("/v1/messages", ASKED | {"output_config": {"effort": "max"}}, "output_config.effort"),
        (
            "/v1/messages",
            ASKED | {"output_config": {"effort": "max"}, "thinking": THINKING},
            "thinking.budget_tokens, output_config.effort",
        ),
    ],
)
def test_what_is_asked_about_reasoning_is_passed_over_where_nothing_marks_it(
    tools_tokenizer: Tokenizer, path: str, body: dict[str, Any], name: str | None
) -> None:
    service = Service(tools_tokenizer, say(tools_tokenizer, "3"))
    plain = {key: value for key, value in body.items() if key in ("messages", "max_tokens", "input")}
    asked, answer = service.call("POST", path, plain), service.call("POST", path, body)
    assert (answer.status, answer.headers.get("x-carousel-ignored")) == (200, name)
    first, second = service.generate.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert (asked.status, second.sampling.grammar) == (200, None)
    strict = service.call("POST", path, body, {"x-strict": "true"})
    assert strict.status == (200 if name is None else 400)
    if name is not None:
        assert f"`{name.split(',')[0]}` has no effect here" in strict.json["error"]["message"]


def test_an_effort_that_the_template_reads_is_not_named() -> None:
    tokenizer = tokenizer_with("{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}")
    answer = Service(tokenizer, say(tokenizer, "3")).chat(reasoning_effort="high", max_tokens=1)
    assert (answer.status, answer.headers.get("x-carousel-ignored")) == (200, None)


def test_the_effort_of_a_message_is_one_of_its_reasoning(tokenizer: Tokenizer) -> None:
    service, body = thinking(tokenizer), ASKED | {"max_tokens": 100, "output_config": {"effort": "max"}}
    for asked in (None, {"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 7}):
        assert service.call("POST", "/v1/messages", body | {"thinking": asked}).status == 200
    budgets = [
        each.sampling.grammar and each.sampling.grammar.thought and each.sampling.grammar.thought.max_tokens
        for each in service.generate.requests
    ]
    assert budgets == [None, None, 95, 7]


def test_reasoning_that_is_over_leaves_the_form_alone(tokenizer: Tokenizer) -> None:
    service = thinking(tokenizer, "{}")
    form = {"response_format": {"type": "json_object"}}
    over = [*THOUGHT[:1], {"role": "assistant", "content": "<think>Well</think>It is "}]
    service.chat(chat_template_kwargs={"enable_thinking": False}, **form)
    service.chat(messages=over, continue_final_message=True, **form)
    service.chat(**form)
    switched_off, continued, free = (each.sampling.grammar for each in service.generate.requests)
    assert switched_off is not None
    assert switched_off == continued
    assert free == replace(switched_off, thought=Thought("<think>", "</think>", is_open=False))


def test_thinking_of_a_message_is_a_variable_of_the_template_and_a_budget(tokenizer: Tokenizer) -> None:
    service, body = thinking(tokenizer), {"messages": [{"role": "user", "content": "?"}], "max_tokens": 99}
    for asked in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 7}, {"type": "adaptive"}):
        assert service.call("POST", "/v1/messages", body | {"thinking": asked}).status == 200
    off, bounded, free = service.generate.requests
    assert tokenizer.decode(off.prompt_token_ids).endswith("</think>\n\n")
    assert bounded.prompt_token_ids == free.prompt_token_ids
    assert bounded.sampling.grammar is not None
    assert bounded.sampling.grammar.thought == Thought("<think>", "</think>", is_open=False, max_tokens=7)
    assert off.sampling.grammar is free.sampling.grammar is None


@pytest.mark.parametrize(("effort", "budget"), [("none", 0), ("minimal", 4), ("medium", 20), ("xhigh", 38)])
def test_an_effort_is_a_budget_by_the_length_of_the_output(computing: Service, effort: str, budget: int) -> None:
    fields = {"messages": THOUGHT, "continue_final_message": True, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    asked, counted = computing.chat(reasoning_effort=effort, **fields), computing.chat(
        thinking_token_budget=budget, **fields
    )  # fmt: skip
    assert message_of(asked) == message_of(counted)
    assert max(budget, 1) <= reasoning_tokens(asked) <= budget + 8
    both = computing.chat(reasoning_effort="high", thinking_token_budget=budget, **fields)
    assert message_of(both) == message_of(counted)


@pytest.mark.parametrize(
    ("fields", "is_off"),
    [
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, False),
    ],
)
def test_an_effort_reaches_the_template(tokenizer: Tokenizer, fields: dict[str, Any], is_off: bool) -> None:
    service = thinking(tokenizer)
    service.chat(**fields)
    prompt = tokenizer.decode(service.request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("</think>\n\n") == is_off


def test_an_effort_in_responses(tokenizer: Tokenizer) -> None:
    answer = thinking(tokenizer).call(
        "POST", "/v1/responses", {"input": "?", "reasoning": {"effort": "high", "summary": "auto"}}
    )
    assert answer.json["reasoning"] == {"effort": "high", "summary": "auto"}
    assert [item["type"] for item in answer.json["output"]] == ["reasoning", "message"]
