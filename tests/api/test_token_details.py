"""What is told of tokens beside their text: log-probabilities, ids, offsets, the prompt; whole and streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from app.api.output.token_details import COMPLETION_LOGPROBS, TokenLogprob, TokenNames, write_logprobs
from app.engine.request import FinishReason, Request, TokenDelta, TokenLogprobs
from app.text import Tokenizer
from tests.kit.service import MAX_MODEL_LEN, Service, Step, last
from tests.text.small_tokenizers import build_byte_level

END = 4  # the bundled model's end token


def one(token_id: int, num_top: int, *, rank: int = 1) -> TokenLogprobs:
    """The token itself is the likeliest, and the ids below it follow."""
    top = tuple(token_id - place for place in range(num_top))
    return TokenLogprobs(-0.5 * rank, rank, top, tuple(-0.5 - place for place in range(num_top)))


def telling(tokenizer: Tokenizer, text: str, *, likelier: Callable[[Request], float] = lambda request: 0.0) -> Any:
    """A script that says a text and scores whatever is asked for, the prompt in two pieces."""
    ids = tokenizer.encode(text, add_special_tokens=False)

    def script(request: Request) -> Iterable[Step]:
        sampling, prompt = request.sampling, request.prompt_token_ids
        yield TokenDelta(request.request_id, ())
        if sampling.prompt_logprobs is not None and len(prompt) > 1:
            scores = tuple(one(token_id, sampling.prompt_logprobs, rank=2) for token_id in prompt[1:])
            yield TokenDelta(request.request_id, (), prompt_logprobs=scores[:1])
            yield TokenDelta(request.request_id, (), prompt_logprobs=scores[1:])
        for token_id in (*ids, END)[: sampling.max_tokens]:
            found = () if sampling.logprobs is None else (one(token_id, sampling.logprobs),)
            found = tuple(each._replace(logprob=each.logprob + likelier(request)) for each in found)
            is_end = token_id == END
            yield TokenDelta(
                request.request_id, (token_id,), FinishReason.STOP if is_end else None, END if is_end else None,
                logprobs=found,
            )  # fmt: skip
        yield TokenDelta(request.request_id, (), FinishReason.LENGTH)

    return script


@pytest.fixture
def told(tokenizer: Tokenizer) -> Service:
    return Service(tokenizer, telling(tokenizer, "3 4 5."))


def test_a_chat_tells_one_entry_for_each_generated_token(told: Service, tokenizer: Tokenizer) -> None:
    body = told.chat(logprobs=True, top_logprobs=2).json
    [choice] = body["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(content) == body["usage"]["completion_tokens"] == 5
    assert [entry["token"] for entry in content] == ["3", " 4", " 5", ".", "<|end|>"]
    assert [bytes(entry["bytes"]).decode() for entry in content] == [entry["token"] for entry in content]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)
    assert {len(entry["top_logprobs"]) for entry in content} == {2}
    assert told.request.sampling.logprobs == 2


def test_without_top_logprobs_there_are_none_beside_the_tokens_own(told: Service) -> None:
    [choice] = told.chat(logprobs=True).json["choices"]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {0}


def test_an_answer_has_no_details_that_were_not_asked_for(told: Service) -> None:
    body = told.chat(logprobs=False, top_logprobs=0, return_token_ids=False).json
    assert body["choices"][0]["logprobs"] is None
    assert body.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert (told.request.sampling.logprobs, told.request.sampling.prompt_logprobs) == (None, None)


@pytest.mark.parametrize("echo", [False, True])
def test_a_completion_tells_four_lists(told: Service, echo: bool) -> None:
    answer = told.complete(prompt="1 2", logprobs=1, echo=echo)
    [choice] = answer.json["choices"]
    found = choice["logprobs"]
    assert choice["text"] == ("1 2" if echo else "") + "3 4 5."
    assert found["tokens"] == [*(["1", " 2"] if echo else []), "3", " 4", " 5", ".", "<|end|>"]
    assert found["token_logprobs"] == [*([None, -1.0] if echo else []), *[-0.5] * 5]
    assert found["text_offset"] == [*([0, 1] if echo else []), *(3 * echo + at for at in (0, 1, 3, 5, 6))]
    assert [top is None for top in found["top_logprobs"]] == [*([True, False] if echo else []), *[False] * 5]
    assert answer.json["usage"]["completion_tokens"] == 5
    assert told.request.sampling.prompt_logprobs == (1 if echo else None)


@pytest.mark.parametrize("fields", [{"logprobs": 2, "echo": True}, {"logprobs": 0}, {"echo": True}], ids=str)
def test_a_streamed_completion_tells_what_a_whole_one_does(told: Service, fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"prompt": ["1 2 7", "8"], "n": 2, "return_token_ids": True} | fields
    whole = told.complete(**asked).json
    streamed = [{"text": "", "token_ids": [], "logprobs": {}} for _ in whole["choices"]]
    for chunk in told.complete(**asked, stream=True).chunks:
        for choice in chunk["choices"]:
            into: Any = streamed[choice["index"]]
            into["text"] += choice["text"]
            into["token_ids"] += choice["token_ids"]
            for name, values in (choice["logprobs"] or {}).items():
                into["logprobs"].setdefault(name, []).extend(values)
            into |= {name: choice[name] for name in ("prompt_token_ids",) if name in choice}
    for choice, into in zip(whole["choices"], streamed, strict=True):
        assert into["text"] == choice["text"]
        assert into["token_ids"] == choice["token_ids"]
        assert into["prompt_token_ids"] == choice["prompt_token_ids"]
        assert (into["logprobs"] or None) == choice["logprobs"]


def test_a_streamed_chat_tells_its_tokens_with_their_text(told: Service, tokenizer: Tokenizer) -> None:
    chunks = told.chat(logprobs=True, stream=True, return_token_ids=True).chunks
    assert chunks[0]["prompt_token_ids"] == list(told.request.prompt_token_ids)
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    told_of = [
        (choice["delta"].get("content"), choice["token_ids"], choice["logprobs"]["content"][0]["token"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    ids = tokenizer.encode("3 4 5.", add_special_tokens=False)
    pieces = ["3", " 4", " 5", "."]
    assert told_of == [*((each, [n], each) for each, n in zip(pieces, ids, strict=True)), ("", [END], "<|end|>")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_tokens_behind_a_stop_string_are_not_told(told: Service) -> None:
    body = told.chat(logprobs=True, return_token_ids=True, stop="4").json
    [choice] = body["choices"]
    assert choice["message"]["content"] == "3 "
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_what_stops_a_text_shows_on_request(told: Service, tokenizer: Tokenizer, stream: bool) -> None:
    [five] = tokenizer.encode(" 5", add_special_tokens=False)

    def text(**fields: Any) -> str:
        answer = told.complete(**fields, stream=stream)
        if stream:
            return "".join(choice["text"] for chunk in answer.chunks for choice in chunk["choices"])
        return str(answer.json["choices"][0]["text"])

    shown = {"include_stop_str_in_output": True}
    assert (text(stop=" 5"), text(stop=" 5", **shown)) == ("3 4", "3 4 5")
    told.generate.script = lambda request: [
        TokenDelta(request.request_id, (8, five), FinishReason.STOP, stop_token_id=five)
    ]
    assert text(stop_token_ids=[five], **shown) == text(stop_token_ids=[five]) + " 5"


def test_prompt_logprobs_are_maps_by_token_id_once_for_each_prompt(told: Service) -> None:
    body = told.complete(prompt=[[20, 21, 22], [30]], n=2, prompt_logprobs=2).json
    found = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert found[0] == found[1]
    assert found[2] == found[3] == [None]
    assert found[0][0] is None
    assert found[0][1]["21"] == {
        "logprob": -1.0,
        "rank": 2,
        "decoded_token": told.tokenizer.decode([21], skip_special_tokens=False),
    }
    assert found[0][2].keys() == {"22", "21"}
    assert [request.sampling.prompt_logprobs for request in told.generate.requests] == [2, None, 2, None]
    assert body["choices"][0]["logprobs"] is None


def test_a_chat_has_prompt_logprobs_beside_its_choices(told: Service) -> None:
    body = told.chat(prompt_logprobs=0, n=2).json
    assert len(body["prompt_logprobs"]) == len(told.generate.requests[0].prompt_token_ids)
    assert body["prompt_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


def test_the_best_come_back_likeliest_first(tokenizer: Tokenizer) -> None:
    by_sample = {"0": -3.0, "1": -1.0, "2": -2.0, "3": -5.0, "4": -0.5, "5": -9.0}
    script = telling(tokenizer, "3", likelier=lambda request: by_sample[request.request_id[-1]])
    service = Service(tokenizer, script)
    body = service.complete(prompt=["1", "2"], n=2, best_of=3, return_token_ids=True).json
    best = [choice["index"] for choice in body["choices"]]
    assert best == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 6 * 2, "all that was generated"
    assert [request.sampling.logprobs for request in service.generate.requests] == [0] * 6
    assert all(choice["logprobs"] is None for choice in body["choices"])
    asked = service.complete(prompt=["1", "2"], n=2, best_of=3, logprobs=0).json
    assert [choice["logprobs"]["token_logprobs"][0] for choice in asked["choices"]] == [-1.5, -2.5, -1.0, -5.5]


def test_a_prompt_without_an_answer(told: Service) -> None:
    body = told.complete(prompt=[5] * MAX_MODEL_LEN, max_tokens=0, echo=True, logprobs=0).json
    [choice] = body["choices"]
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 0)
    assert len(choice["logprobs"]["tokens"]) == MAX_MODEL_LEN
    [choice] = told.complete(prompt="1 2", max_tokens=0, echo=True).json["choices"]
    assert (choice["text"], choice["logprobs"]) == ("1 2", None)
    [choice] = told.complete(prompt="1 2", max_tokens=0, prompt_logprobs=0).json["choices"]
    assert choice["text"] == ""
    assert len(choice["prompt_logprobs"]) == 2


def test_a_prompt_of_ids_is_echoed_as_their_text(told: Service, tokenizer: Tokenizer) -> None:
    ids = list(tokenizer.encode("1 2", add_special_tokens=False))
    [choice] = told.complete(prompt=[ids], echo=True).json["choices"]
    assert choice["text"] == "1 23 4 5."
    [choice] = told.complete(prompt="1 2", echo=True, truncate_prompt_tokens=1).json["choices"]
    assert choice["text"] == " 23 4 5."


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_ids", [False, True])
def test_special_tokens_of_an_echoed_prompt_are_in_the_text_and_in_the_offsets(
    told: Service, tokenizer: Tokenizer, in_ids: bool, stream: bool, skip_special_tokens: bool
) -> None:
    text = "<|user|>1 2<|end|>"
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    fields = {"echo": True, "logprobs": 0, "max_tokens": 2, "skip_special_tokens": skip_special_tokens}
    answer = told.complete(prompt=ids if in_ids else text, stream=stream, **fields)
    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    assert "".join(choice["text"] for choice in choices) == f"{text}3 4"
    offsets = [offset for choice in choices if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 8, 9, 11, 18, 19]


@pytest.mark.parametrize(
    ("num_kept", "text", "offsets"),
    [(None, "<s>ab.", [0, 0, 3, 4, 5]), (9, "<s>ab.", [0, 0, 3, 4, 5]), (2, "ab.", [0, 1, 2])],
)
def test_a_token_that_the_tokenizer_puts_before_a_prompt_has_no_place_in_its_echo(
    num_kept: int | None, text: str, offsets: list[int]
) -> None:
    tokenizer = build_byte_level(special=["<s>"], begins_with="<s>")
    told = Service(tokenizer, telling(tokenizer, "."))
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1, "truncate_prompt_tokens": num_kept}
    [choice] = told.complete(prompt="<s>ab", **fields).json["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


@pytest.mark.parametrize(
    ("num_kept", "max_tokens", "num_tokens"), [(5, 8, 5), (500, 8, 100), (-1, 8, 100), (-1, 150, 50), (-1, 199, 1)]
)
def test_a_prompt_is_cut_to_its_end(told: Service, num_kept: int, max_tokens: int, num_tokens: int) -> None:
    prompt = list(range(5, 105))
    assert told.complete(prompt=prompt, truncate_prompt_tokens=num_kept, max_tokens=max_tokens).status == 200
    assert list(told.request.prompt_token_ids) == prompt[-num_tokens:]


def test_a_chat_goes_on_with_its_last_message(told: Service, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is"}]
    for fields in ({}, {"add_generation_prompt": False}):
        told.generate.requests.clear()
        assert told.chat(messages=messages, continue_final_message=True, **fields).status == 200
        prompt = tokenizer.decode(told.request.prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith("<|assistant|>The answer is")


def test_tokens_can_be_named_by_their_ids(told: Service, tokenizer: Tokenizer) -> None:
    ids = (*tokenizer.encode("3 4 5.", add_special_tokens=False), END)
    names = [f"token_id:{token_id}" for token_id in ids]
    [choice] = told.complete(logprobs=1, return_tokens_as_token_ids=True).json["choices"]
    assert choice["logprobs"]["tokens"] == [next(iter(top)) for top in choice["logprobs"]["top_logprobs"]] == names
    [choice] = told.chat(logprobs=True, return_tokens_as_token_ids=True).json["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names


def test_parts_of_characters_have_names_of_their_own() -> None:
    tokenizer = build_byte_level()
    names = TokenNames(tokenizer.token_bytes)
    assert (names(0xE2), names(0x41), names.bytes(0xE2)) == ("bytes:\\xe2", "A", [0xE2])
    found = TokenLogprobs(-3.0, 3, (0xE2, 0xE3), (-1.0, -2.0))
    [top] = write_logprobs(COMPLETION_LOGPROBS, [TokenLogprob(0x41, found, 0)], names, num_top=2)["top_logprobs"]
    assert top == {"bytes:\\xe2": -1.0, "bytes:\\xe3": -2.0, "A": -3.0}


def test_tokens_of_one_name_are_told_apart_and_infinities_are_written() -> None:
    class Same:
        def token_bytes(self, token_id: int) -> bytes:
            return b"same"

    names = TokenNames(Same().token_bytes)
    found = TokenLogprobs(float("-inf"), 9, (1, 2), (-1.0, float("-inf")))
    [top] = write_logprobs(COMPLETION_LOGPROBS, [TokenLogprob(7, found, 0)], names, num_top=2)["top_logprobs"]
    assert top == {"same": -1.0, "token_id:2": -9999.0, "token_id:7": -9999.0}


LONG = 131_072


def long_service(tokenizer: Tokenizer) -> Service:
    return Service(tokenizer, lambda request: [last(request, (), FinishReason.LENGTH)], max_model_len=LONG)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"n": 16, "max_tokens": 8192, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        ("completions", {"n": 16, "max_tokens": 8192, "logprobs": 20}, "logprobs"),
        ("completions", {"prompt": ["a"] * 128, "max_tokens": 8192, "logprobs": 0}, "logprobs"),
        ("completions", {"prompt": [5] * 60_000, "echo": True, "max_tokens": 0, "logprobs": 20}, "logprobs"),
        ("completions", {"prompt": [5] * 60_000, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("chat/completions", {"logprobs": True, "n": 16, "max_tokens": 100_000, "stream": True}, "top_logprobs"),
        (
            "responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 60_000},
            "top_logprobs",
        ),
    ],
    ids=str,
)
def test_an_answer_with_too_many_logprobs_is_refused_before_it_begins(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], param: str
) -> None:
    service = long_service(tokenizer)
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    prompts: dict[str, Any] = {"chat/completions": chat, "completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}
    answer = service.call("POST", f"/v1/{path}", prompts[path] | fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "this server accepts 1,000,000" in answer.error["message"]
    assert not service.generate.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 8192, "logprobs": 20},
        {"prompt": [5] * (LONG - 1), "echo": True, "max_tokens": 1, "logprobs": 5},
        {"prompt": [[5] * 4095] * 64, "echo": True, "max_tokens": 1, "logprobs": 1},
        {"n": 16, "max_tokens": 2048, "logprobs": 20},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_evaluations_with_logprobs_are_within_the_bound(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    assert long_service(tokenizer).complete(**fields).status == 200


def test_an_output_of_no_asked_length_is_as_long_as_its_logprobs_allow(tokenizer: Tokenizer) -> None:
    service = long_service(tokenizer)
    assert service.chat(n=2, logprobs=True, top_logprobs=19).status == 200
    assert [each.sampling.max_tokens for each in service.generate.requests] == [25_000] * 2
    assert service.chat(n=2, logprobs=True, top_logprobs=19, min_tokens=25_001).error["param"] == "top_logprobs"
