"""/tokenize, /detokenize, /tokenizer_info and /version, as vLLM's clients use them."""

from __future__ import annotations

from app.text import Tokenizer
from tests.kit.service import MAX_MODEL_LEN, Service, say


def test_a_text_becomes_its_token_ids_and_comes_back(service: Service) -> None:
    answer = service.call("POST", "/tokenize", {"prompt": "Count from 3 to 9.", "return_token_strs": True}).json
    tokens = list(service.tokenizer.encode("Count from 3 to 9.", add_special_tokens=True))
    assert answer["tokens"] == tokens
    assert answer["count"] == len(tokens) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert service.call("POST", "/detokenize", {"tokens": tokens}).json == {"prompt": "Count from 3 to 9."}


def test_token_strings_come_only_when_asked_for(service: Service) -> None:
    assert service.call("POST", "/tokenize", {"prompt": "3"}).json["token_strs"] is None


def test_a_conversation_is_tokenized_as_a_chat_would_be(service: Service) -> None:
    messages = [{"role": "user", "content": "Count from 3 to 9."}]
    answer = service.call("POST", "/tokenize", {"messages": messages, "prompt": None}).json
    assert service.chat(messages=messages).status == 200
    assert tuple(answer["tokens"]) == service.request.prompt_token_ids


def test_long_texts_and_lists_come_out_the_same(service: Service) -> None:
    text = "Count from 3 to 9. " * 500
    answer = service.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert service.call("POST", "/detokenize", {"tokens": answer["tokens"]}).json["prompt"] == text


def test_the_tokenizer_tells_its_special_tokens_and_template(service: Service) -> None:
    answer = service.call("GET", "/tokenizer_info").json
    assert service.tokenizer.encode(answer["eos_token"], add_special_tokens=False) == (4,)
    assert "message" in answer["chat_template"]


def test_the_tokenizer_of_several_must_be_named(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), names=("small", "large"))
    assert service.call("GET", "/tokenizer_info").error["param"] == "model"
    assert service.call("GET", "/tokenizer_info", query="model=large").status == 200


def test_the_version_is_that_of_the_package(service: Service) -> None:
    assert service.call("GET", "/version").json.keys() == {"version"}


def test_a_model_is_served_under_its_aliases_too(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, say(tokenizer, "3"), aliases=("gpt-4o", "default"))
    listed = service.call("GET", "/v1/models").json["data"]
    assert [(entry["id"], entry["root"]) for entry in listed] == [
        ("demo", "demo"), ("gpt-4o", "demo"), ("default", "demo"),
    ]  # fmt: skip
    assert service.complete(model="gpt-4o").json["model"] == "demo"
    assert service.complete().status == 200, "one model under three names is still the only one"
    assert service.call("GET", "/v1/models/gpt-4o").json["id"] == "gpt-4o"
