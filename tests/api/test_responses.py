"""/v1/responses: what it asks of the model, and its responses, whole and as events, read by the openai package too."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.engine.request import FinishReason
from app.errors import StepFailed
from app.jobs.job import Item
from app.jobs.outputs import BatchFormat
from app.text import Tokenizer
from app.text.tool_calls import FORMATS
from tests.api.test_token_details import telling
from tests.kit.service import CALL, Answer, Service, calling, openai_client, say

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def ask(service: Service, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return service.call("POST", "/v1/responses", {"input": "Hi"} | fields, headers)


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events, after checking that each is numbered."""
    assert [event["sequence_number"] for event in answer.events] == list(range(len(answer.events)))
    return answer.events


def test_a_response(service: Service) -> None:
    response = ask(service, metadata={"a": "b"}, temperature=0.5, instructions="Count.").json
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "demo")
    [item] = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "3 4 5.", "annotations": [], "logprobs": []}]
    assert (response["metadata"], response["temperature"], response["instructions"]) == ({"a": "b"}, 0.5, "Count.")
    assert (response["store"], response["previous_response_id"], response["error"]) == (False, None, None)
    usage = response["usage"]
    assert usage["input_tokens"] == len(service.request.prompt_token_ids)
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    assert usage["input_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"a": 1}, "metadata.a"),
        ({"a": {"b": "c"}}, "metadata.a"),
        ({f"k{number}": "v" for number in range(17)}, "metadata"),
        ({"k" * 65: "v"}, "metadata"),
        ({"k": "v" * 513}, "metadata"),
    ],
)
def test_metadata_are_16_short_strings_as_at_openai(service: Service, metadata: Any, param: str) -> None:
    assert ask(service, metadata=metadata).error["param"] == param
    most = {f"{number:064}": "v" * 512 for number in range(16)}
    assert ask(service, metadata=most).json["metadata"] == most


def test_it_is_the_chat_that_it_looks_like(service: Service) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "message", "role": "user", "content": "d"},
    ]
    ask(service, input=items, instructions="s", max_output_tokens=7, seed=1, top_k=3, user="me", logit_bias={"5": 1})
    request = service.request
    messages = [("system", "s"), ("user", "a\nb"), ("assistant", "c"), ("user", "d")]
    chat = [{"role": role, "content": content} for role, content in messages]
    assert request.prompt_token_ids == service.tokenizer.encode_chat(chat)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.logit_bias) == (7, 1, 3, ((5, 1.0),))
    assert request.tenant == "me"


def test_events_build_the_response_up(service: Service) -> None:
    events = events_of(ask(service, stream=True))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 4,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    assert events[2]["item"]["content"] == []
    assert "".join(event["delta"] for event in events[4:8]) == events[8]["text"] == "3 4 5."
    assert {event["item_id"] for event in events[3:10]} == {events[2]["item"]["id"]}
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    whole = ask(service).json
    for response in (final, whole):
        for item in [response, *response["output"]]:
            item["id"] = ""
    assert final | {"created_at": 0} == whole | {"created_at": 0}


def test_text_and_calls_are_items_one_after_the_other(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, f"Let me see.\n{CALL}\n{CALL}")
    response = ask(service, tools=[TOOL]).json
    message, first, second = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    for call in (first, second):
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
        assert call["call_id"].startswith("call_")
    assert len({first["id"], second["id"], first["call_id"], second["call_id"]}) == 4
    assert (response["status"], response["tools"][0]["name"]) == ("completed", "f")
    events = events_of(ask(service, tools=[TOOL], stream=True))
    by_item = {
        index: [event["type"] for event in events if event.get("output_index") == index and "delta" not in event]
        for index in range(3)
    }
    around = ["response.output_item.added", "response.output_item.done"]
    assert by_item[1] == by_item[2] == [around[0], "response.function_call_arguments.done", around[1]]
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"a": 1}' * 2
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call", "function_call"]


def test_calls_and_what_came_of_them_go_back_to_the_model(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, "1")
    items = [
        {"role": "user", "content": "?"},
        {"type": "message", "role": "assistant", "content": "Well."},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}', "id": "fc"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
    ]  # fmt: skip
    assert ask(service, input=items, tools=[TOOL]).status == 200
    prompt = tools_tokenizer.decode(service.request.prompt_token_ids, skip_special_tokens=False)
    second = CALL.replace('{"a": 1}', "{}")
    assert f"<|user|>?<|end|><|assistant|>Well.{CALL}{second}<|end|><|tool|>4<|end|><|tool|>5<|end|>" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_short_is_incomplete(tokenizer: Tokenizer, stream: bool) -> None:
    service = Service(tokenizer, say(tokenizer, "3 4", reason=FinishReason.LENGTH))
    answer = ask(service, stream=stream)
    response = events_of(answer)[-1]["response"] if stream else answer.json
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_without_words_is_an_empty_message(tokenizer: Tokenizer, stream: bool) -> None:
    answer = ask(Service(tokenizer, say(tokenizer, "")), stream=stream)
    response = events_of(answer)[-1]["response"] if stream else answer.json
    assert response["output"][0]["content"][0]["text"] == ""


def test_a_failure_in_mid_stream_makes_a_failed_response(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20,), StepFailed("secret")])
    *_, last = events_of(ask(service, stream=True))
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in last["response"]["error"]["message"]
    assert last["response"]["usage"]["output_tokens"] == 1


def test_null_is_not_given_and_harmless_values_ask_for_nothing(service: Service) -> None:
    names = "instructions max_output_tokens tools tool_choice text metadata store previous_response_id reasoning stream"
    assert ask(service, **dict.fromkeys(names.split())).status == 200
    harmless = {"store": False, "include": [], "truncation": "disabled", "text": {"format": {"type": "text"}}, "n": 1}
    answer = ask(service, {"x-strict": "true"}, **harmless)
    assert answer.status == 200, answer.json


async def test_the_openai_package_goes_on_with_a_call(tools_tokenizer: Tokenizer) -> None:
    service = calling(tools_tokenizer, CALL)
    async with openai_client(service.app) as client:
        asked: Any = {"model": "demo", "input": [{"role": "user", "content": "?"}], "tools": [TOOL]}
        response = await client.responses.create(**asked)
        [call] = response.output
        assert call.type == "function_call"
        asked["input"] += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
        async with client.responses.stream(**asked) as stream:
            await stream.until_done()
            [again] = (await stream.get_final_response()).output
        assert again.type == "function_call"
        assert json.loads(again.arguments) == {"a": 1}


async def test_the_openai_package_sees_a_failed_response(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, lambda request: [(20,), StepFailed("no")])
    async with openai_client(service.app) as client:
        events = [event async for event in await client.responses.create(model="demo", input="Hi", stream=True)]
        assert events[-1].type == "response.failed"


def test_a_line_of_a_batch_may_ask_for_a_response(service: Service) -> None:
    answered = asyncio.run(service.handler.handle_item("", "/v1/responses", {"input": "Hi"}))
    assert (answered.status_code, answered.body["output"][0]["content"][0]["text"]) == (200, "3 4 5.")
    result = BatchFormat("batch_1").answered(Item(number=0, id="a", url="/v1/responses", body={}), answered)
    usage = answered.body["usage"]
    counted = (result.num_input_tokens, result.num_cached_tokens, result.num_output_tokens)
    assert counted == (usage["input_tokens"], 2, 5)


INCLUDE = ["message.output_text.logprobs"]


def test_log_probabilities_come_whole_and_in_events(service: Service) -> None:
    asked = Service(service.tokenizer, telling(service.tokenizer, "3 4 5."))
    response = ask(asked, include=INCLUDE, top_logprobs=2).json
    found = response["output"][0]["content"][0]["logprobs"]
    assert response["top_logprobs"] == 2
    assert len(found) == response["usage"]["output_tokens"] == 5, "one for every token that counts, the end token too"
    assert "".join(each["token"] for each in found) == "3 4 5.<|end|>"
    assert all(each["bytes"] == list(each["token"].encode()) for each in found)
    assert all(
        len(each["top_logprobs"]) == 2 and each["top_logprobs"][0]["logprob"] == each["logprob"] for each in found
    )
    events = events_of(ask(asked, include=INCLUDE, top_logprobs=2, stream=True))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == found
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == found == events[-1]["response"]["output"][0]["content"][0]["logprobs"]
    # As in a chat of the same words.
    chat = asked.chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert chat == found


def test_log_probabilities_are_computed_only_where_they_are_asked_for(service: Service) -> None:
    assert ask(service, include=[]).json["output"][0]["content"][0]["logprobs"] == []
    assert service.request.sampling.logprobs is None
    for fields in ({"top_logprobs": 0}, {"include": None, "top_logprobs": None}, {"include": INCLUDE, "stream": None}):
        assert ask(service, **fields).status == 200


def test_log_probabilities_are_those_of_text_and_not_of_calls(tools_tokenizer: Tokenizer) -> None:
    says = telling(tools_tokenizer, f"Well.\n{CALL}")
    service = Service(tools_tokenizer, says, tool_format=FORMATS["hermes"], max_model_len=2000)
    message, call = ask(service, tools=[TOOL], include=INCLUDE).json["output"]
    told = "".join(each["token"] for each in message["content"][0]["logprobs"])
    assert told == "Well."
    assert call["type"] == "function_call"


async def test_the_openai_package_reads_log_probabilities(service: Service) -> None:
    async with openai_client(Service(service.tokenizer, telling(service.tokenizer, "3 4 5.")).app) as client:
        wanted: Any = {"model": "demo", "input": "?", "include": INCLUDE, "top_logprobs": 3}
        response = await client.responses.create(**wanted)
        item = response.output[0]
        assert item.type == "message"
        part = item.content[0]
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert [each.logprob for each in part.logprobs] == [-0.5] * 5
        assert part.logprobs[1].top_logprobs[0].token == part.logprobs[1].token
        streamed = []
        async with client.responses.stream(**wanted) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    streamed += [each.logprob for each in event.logprobs]
            final = await stream.get_final_response()
        assert streamed == [-0.5] * 5
        assert final.output_text == response.output_text == "3 4 5."


def turns(number: int) -> list[dict[str, Any]]:
    """Questions of which each has a call and its result."""
    return [
        item
        for turn in range(number)
        for item in (
            {"role": "user", "content": f"Question {turn}?"},
            {"type": "function_call", "call_id": f"c{turn}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{turn}", "output": f"Result {turn}."},
        )
    ]


@pytest.mark.parametrize("num_turns", [1, 2, 30, 31, 32, 100])
def test_the_oldest_turns_are_left_out_where_all_do_not_fit(tools_tokenizer: Tokenizer, num_turns: int) -> None:
    service = Service(tools_tokenizer, say(tools_tokenizer, "3"), max_model_len=2000, tool_format=FORMATS["hermes"])
    given: dict[str, Any] = {"instructions": "Be brief.", "input": turns(num_turns), "max_output_tokens": 20}
    whole = ask(service, **given)
    answer = ask(service, truncation="auto", **given)
    assert (answer.status, answer.json["truncation"]) == (200, "auto")
    prompt = tools_tokenizer.decode(service.generate.requests[-1].prompt_token_ids)
    kept = [turn for turn in range(num_turns) if f"Question {turn}?" in prompt]
    assert kept == [turn for turn in range(num_turns) if f"Result {turn}." in prompt] == [*range(kept[0], num_turns)]
    assert "Be brief." in prompt
    if whole.status == 200:
        assert kept[0] == 0
    else:
        assert whole.error["code"] == "context_length_exceeded"
        more = given | {"input": given["input"][3 * (kept[0] - 1) :]}
        assert ask(service, **more).status == 400, "as many as fit"


def test_a_last_turn_that_does_not_fit_is_refused_with_its_numbers(service: Service) -> None:
    items = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "!" * 500}]
    answer = ask(service, input=items, truncation="auto", max_output_tokens=5)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert ask(service, input=[{"role": "system", "content": "!" * 500}], truncation="auto").status == 400
