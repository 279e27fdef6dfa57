"""/v1/decisions: what it asks of the engine, how probabilities are written; a real model and the openai package."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from string import ascii_uppercase
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from app.engine.async_engine import AsyncEngine
from app.engine.request import FinishReason, Request, TokenDelta, TokenLogprobs
from app.text import Tokenizer
from app.text.reasoning import MARKS
from tests.kit.service import Answer, Service, Step, bearer, entry, openai_client
from tests.text.small_tokenizers import build_byte_level

PREDICATE: dict[str, Any] = {"type": "predicate", "name": "sad", "instructions": "Is it sad?"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Who?"}],
    "choices": [{"value": "Lily", "description": "a girl"}, {"value": True}, {"value": "true"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "instructions": "How long?",
    "levels": [{"label": "short"}, {"label": "long"}],
}
QUESTIONS: list[Any] = [PREDICATE, CHOICE, SCORE]


def likely(request: Request) -> Iterable[Step]:
    """The labels of each question with the shares 1/2, 1/4, 1/8, … of the vocabulary."""
    named = request.sampling.logprob_token_ids
    logprobs = tuple(-(place + 1) * math.log(2) for place in range(len(named)))
    told = TokenLogprobs(-9.0, 100, named, logprobs)
    yield TokenDelta(request.request_id, (9,), FinishReason.LENGTH, num_cached_tokens=3, logprobs=(told,))


@pytest.fixture
def service(tokenizer: Tokenizer) -> Service:
    return Service(tokenizer, likely)


def ask(service: Service, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"input": "Once upon a time there was a girl.", "questions": QUESTIONS} | fields
    return service.call("POST", "/v1/decisions", body, headers)


def refused(service: Service, **fields: Any) -> tuple[str, str]:
    """The parameter that an error names, and its words. Nothing may have been generated."""
    answer = ask(service, **fields)
    assert answer.status == 400, answer.body
    assert not service.generate.requests
    return answer.error["param"], answer.error["message"]


def test_each_kind_of_question_has_its_answer(service: Service) -> None:
    answer = ask(service)
    assert answer.status == 200, answer.body
    predicate, choice, score = answer.json["answers"]
    assert predicate == {"type": "predicate", "name": "sad", "probability": pytest.approx(2 / 3)}
    assert choice == {
        "type": "choice",
        "name": None,
        "choice": "Lily",
        "probabilities": [
            {"value": "Lily", "probability": pytest.approx(4 / 7)},
            {"value": True, "probability": pytest.approx(2 / 7)},
            {"value": "true", "probability": pytest.approx(1 / 7)},
        ],
        # 4/7 of the labels' mass, which is 7/8.
        "confidence": pytest.approx(1 / 2),
    }
    assert score == {
        "type": "score",
        "name": None,
        "score": pytest.approx(1 / 3),
        "probabilities": [
            {"value": 0, "label": "short", "probability": pytest.approx(2 / 3)},
            {"value": 1, "label": "long", "probability": pytest.approx(1 / 3)},
        ],
        "confidence": pytest.approx(1 / 2),
    }
    num_tokens = sum(len(each.prompt_token_ids) for each in service.generate.requests)
    assert answer.headers["x-carousel-prompt-version"] == "1"
    assert answer.json.keys() == {"model", "answers", "usage"}, "OpenAI's schema has no other fields"
    assert answer.json["usage"] == {
        "input_tokens": num_tokens,
        "input_tokens_details": {"cached_tokens": 9, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_tokens + 3,
    }


def test_each_question_is_one_request_of_one_token_behind_the_same_beginning(service: Service) -> None:
    ask(service, user="me", priority=3)
    requests = service.generate.requests
    prompts = [service.tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in requests]
    begin = "<|user|>Once upon a time there was a girl.\n\nQuestion: "
    assert prompts == [
        # This tokenizer splits Yes and No.
        f"{begin}Is it sad?\n\nA. Yes\nB. No\n\nAnswer with the letter of one option.<|end|><|assistant|>",
        f"{begin}Who?\n\nA. Lily: a girl\nB. true\nC. true\n\n"
        "Answer with the letter of one option.<|end|><|assistant|>",
        f"{begin}How long?\n\n0. short\n1. long\n\nAnswer with the number of one level.<|end|><|assistant|>",
    ]
    for request, labels in zip(requests, ("AB", "ABC", "01"), strict=True):
        sampling = request.sampling
        assert [service.tokenizer.token_text(each) for each in sampling.logprob_token_ids] == list(labels)
        assert (sampling.max_tokens, sampling.logprobs, request.tenant, request.priority) == (1, 0, "me", 3)


def test_the_first_question_is_computed_before_the_others_begin(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer)
    open_at_begin: list[int] = []

    def script(request: Request) -> Iterable[Step]:
        open_at_begin.append(len(service.generate.open))
        yield from likely(request)

    service.generate.script = script
    assert ask(service, questions=[PREDICATE] * 5).status == 200
    assert open_at_begin == [1, 1, 2, 3, 4]


def test_all_questions_of_a_call_are_for_the_replica_of_its_first(service: Service) -> None:
    assert [ask(service).status for _ in range(2)] == [200, 200]
    calls = [each.call for each in service.generate.requests]
    assert all(calls)
    assert [calls.count(each) for each in sorted(set(calls))] == [3, 3]


def test_prompts_are_those_of_a_chat(service: Service) -> None:
    ask(service, questions=[PREDICATE])
    text = "Once upon a time there was a girl.\n\nQuestion: Is it sad?\n\nA. Yes\nB. No\n\n"
    asked = {"role": "user", "content": f"{text}Answer with the letter of one option."}
    service.chat(messages=[asked], max_tokens=1)
    one, other = service.generate.requests
    assert one.prompt_token_ids == other.prompt_token_ids


def test_messages_are_one_input(service: Service) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Ho"}]},
    ]
    assert ask(service, input=messages, questions=[PREDICATE]).status == 200
    assert "Hi\n\nHo\n\nQuestion: " in service.tokenizer.decode(service.request.prompt_token_ids)


def test_reasoning_that_the_template_begins_is_closed() -> None:
    begun = build_byte_level("{{ messages[0].content }}<|end|><think>", ("<think>", "</think>"))
    service = Service(begun, likely, reasoning_marks=MARKS[0])
    assert ask(service, questions=[SCORE]).status == 200
    prompt = begun.decode(service.request.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("level.<|end|><think></think>\n\n")


def joining(*pairs: str) -> Tokenizer:
    """A token for each byte and for each of these pairs of characters, wherever they stand."""
    symbols = bytes_to_unicode()
    vocab = {symbols[byte]: byte for byte in range(256)} | {pair: 256 + at for at, pair in enumerate(pairs)}
    backend = Backend(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    template = "{{ messages[0].content }}\nReply:"
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template))


def test_more_choices_than_letters_get_pairs_of_letters_that_are_one_token() -> None:
    service = Service(joining("AB", "QX", "ZZ"), likely, max_model_len=2000)
    choices = [{"value": f"v{number}"} for number in range(29)]
    assert ask(service, questions=[CHOICE | {"choices": choices}]).status == 200
    labels = [service.tokenizer.token_text(each) for each in service.request.sampling.logprob_token_ids]
    assert labels == [*ascii_uppercase, "AB", "QX", "ZZ"]
    prompt = service.tokenizer.decode(service.request.prompt_token_ids)
    assert "\nZ. v25\nAB. v26\nQX. v27\nZZ. v28\n\nAnswer" in prompt


def test_a_tokenizer_that_joins_what_questions_share_with_what_they_do_not_encodes_whole_prompts() -> None:
    service = Service(joining("n:"), likely, max_model_len=2000)
    assert ask(service).status == 200
    for request in service.generate.requests:
        text = service.tokenizer.decode(request.prompt_token_ids)
        assert request.prompt_token_ids == service.tokenizer.encode(text, add_special_tokens=False)
        assert 256 in request.prompt_token_ids


def test_labels_that_the_tokenizer_joins_with_what_is_before_them_are_none() -> None:
    service = Service(joining(":A"), likely, max_model_len=2000)
    param, message = refused(service, questions=[CHOICE | {"choices": [{"value": str(n)} for n in range(26)]}])
    assert param == "questions[0].choices"
    assert "requires 26 labels that are single tokens, but the tokenizer of 'demo' has only 25;" in message


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is required"),
    ({"input": ""}, "input", "at least 1 character"),
    ({"input": 3}, "input", "a string or a list"),
    ({"input": [{"role": "system", "content": "Hi"}]}, "input[0].role", "'user'"),
    ({"input": [{"role": "user", "content": "Hi", "id": 3}]}, "input[0].id", "there is no field input[0].id"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
        "has an image in the part with index 0, of type 'input_image'; this service supports only text",
    ),
    ({"questions": []}, "questions", "has 0 items; 1 to 200 are accepted"),
    ({"questions": [PREDICATE] * 201}, "questions", "has 201 items; 1 to 200 are accepted"),
    ({"questions": [PREDICATE, {"type": "guess"}]}, "questions[1]", '"predicate", "choice" or "score"'),
    ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "is required"),
    ({"questions": [PREDICATE | {"instructions": ""}]}, "questions[0].instructions", "at least 1 character"),
    ({"questions": [PREDICATE | {"choices": []}]}, "questions[0].choices", "there is no field"),
    ({"questions": [CHOICE | {"choices": [{"value": "a"}]}]}, "questions[0].choices", "has 1 items; 2 to 255"),
    (
        {"questions": [SCORE, CHOICE | {"choices": [{"value": str(n)} for n in range(256)]}]},
        "questions[1].choices",
        "has 256 items; 2 to 255",
    ),
    (
        {"questions": [CHOICE | {"choices": [{"value": "a"}, {"value": "b"}, {"value": "a"}]}]},
        "questions[0].choices",
        "has the value 'a' twice, at the indexes 0 and 2",
    ),
    ({"questions": [CHOICE | {"choices": [{"value": 3}, {"value": 4}]}]}, "questions[0].choices[0].value", "boolean"),
    ({"questions": [SCORE | {"levels": [{"label": "x"}] * 11}]}, "questions[0].levels", "has 11 items; 2 to 10"),
    ({"joint": True}, "joint", "there is no field joint"),
    ({"stream": True}, "stream", "there is no field stream"),
    ({"safety_identifier": "x" * 129}, "safety_identifier", "128"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG)
def test_bad_input_is_refused_by_name(service: Service, fields: dict[str, Any], param: str, words: str) -> None:
    assert refused(service, **fields)[0] == param
    assert words in refused(service, **fields)[1]


def test_a_question_that_does_not_fit_is_named_with_its_tokens(service: Service) -> None:
    param, message = refused(service, questions=[PREDICATE, PREDICATE | {"instructions": "3 " * 300}])
    assert param == "questions[1]"
    assert "tokens and `questions[1]` " in message
    assert "this model accepts 199 tokens in total" in message
    assert refused(service, input="3 " * 300)[0] == "input"
    assert refused(service, input="3 " * 100_000)[0] == "input"


def test_more_answers_than_labels_are_refused_with_the_numbers(service: Service) -> None:
    choices = [{"value": str(number)} for number in range(27)]
    param, message = refused(service, questions=[PREDICATE, CHOICE | {"choices": choices}])
    assert param == "questions[1].choices"
    assert "requires 27 labels that are single tokens, but the tokenizer of 'demo' has only 26;" in message


def test_models_that_cannot_answer_are_refused(tokenizer: Tokenizer) -> None:
    encoder = Service(tokenizer, likely, model_info={"generates": False})
    assert "is an encoder and generates no text" in refused(encoder)[1]
    without = Service(build_byte_level(None), likely)
    assert "has no chat template" in refused(without)[1]


def test_a_replica_that_knows_no_labels_gives_no_answer(tokenizer: Tokenizer) -> None:
    def older(request: Request) -> Iterable[Step]:
        yield TokenDelta(request.request_id, (9,), FinishReason.LENGTH, logprobs=(TokenLogprobs(-1.0, 1),))

    assert ask(Service(tokenizer, older)).status == 503


def test_a_key_pays_for_all_prompts(tokenizer: Tokenizer) -> None:
    service = Service(tokenizer, likely, keys=[entry(tokens_per_minute=100)])
    assert [ask(service, headers=bearer()).status for _ in range(2)] == [200, 429]


async def test_probabilities_are_those_of_the_same_prompts_alone(tokenizer: Tokenizer, engine: AsyncEngine) -> None:
    """In every bit: of each prompt with a label behind it, scored by a completion."""
    noted: dict[str, tuple[Request, TokenDelta]] = {}

    async def noting(request: Request) -> AsyncIterator[TokenDelta]:
        async for delta in engine.generate(request):
            noted[request.request_id] = request, delta
            yield delta

    service = Service(tokenizer, generate=noting, max_model_len=2000)
    body = {"input": "Once upon a time there was a girl. " * 20, "questions": QUESTIONS}
    answer = (await service.answer("POST", "/v1/decisions", body)).json
    asked = list(noted.values())
    for (request, delta), found in zip(asked, answer["answers"], strict=True):
        [told] = delta.logprobs
        for label, logprob in zip(request.sampling.logprob_token_ids, told.top_logprobs, strict=True):
            scored = {"prompt": [*request.prompt_token_ids, label], "echo": True, "max_tokens": 0, "logprobs": 0}
            alone = (await service.answer("POST", "/v1/completions", scored)).json
            assert alone["choices"][0]["logprobs"]["token_logprobs"][-1] == logprob
        shares = [math.exp(each) / sum(map(math.exp, told.top_logprobs)) for each in told.top_logprobs]
        given = [each["probability"] for each in found.get("probabilities", [found])]
        assert given == pytest.approx(shares[: len(given)])


async def test_the_beginning_is_computed_once(tokenizer: Tokenizer, engine: AsyncEngine) -> None:
    service = Service(tokenizer, generate=engine.generate, max_model_len=2000)
    text = "There was a dog named Max. " * 50
    body = {"input": text, "questions": [SCORE | {"instructions": f"How {n}?"} for n in range(20)]}
    usage = (await service.answer("POST", "/v1/decisions", body)).json["usage"]
    num_own, num_begin = 80, len(tokenizer.encode(text, add_special_tokens=False))
    num_computed = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert usage["input_tokens"] > 20 * num_begin
    assert num_begin < num_computed < num_begin + 20 * num_own < 2 * num_begin + 20 * num_own


async def test_the_openai_package_reads_the_answers(service: Service) -> None:
    async with openai_client(service.app) as client:
        decision = await client.decisions.create(model="demo", input="Hi", questions=QUESTIONS)
    assert [(each.type, each.name) for each in decision.answers] == [
        ("predicate", "sad"), ("choice", None), ("score", None),
    ]  # fmt: skip
    assert decision.answers[1].type == "choice"
    assert [each.value for each in decision.answers[1].probabilities] == ["Lily", True, "true"]
    assert decision.usage.output_tokens == 3


async def test_items_of_a_batch_are_answered(service: Service) -> None:
    body = {"input": "Hi", "questions": QUESTIONS}
    answered = await service.handler.handle_item("", "/v1/decisions", body)
    assert answered.status_code == 200
    assert [request.is_background for request in service.generate.requests] == [True] * 3
