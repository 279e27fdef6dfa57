"""Several models answer: which answer is chosen, and what becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from app.api.output.choices import MAX_TOKENS_AT_ONCE
from app.engine.request import Request
from app.errors import Overloaded
from app.text import Tokenizer
from tests.kit.service import CASCADE, WAIT, Connection, Service, Step, say_likely

NAMES = ("a", "b", "c")


def ensemble(tokenizer: Tokenizer, choose: str, said: Mapping[str, tuple[str, float]], **settings: Any) -> Service:
    steps = [{"kind": "ensemble", "models": list(NAMES), "choose": choose}]
    scripts = {name: say_likely(tokenizer, *said[name]) for name in NAMES}
    return Service(tokenizer, names=NAMES, pipelines=[{"name": "all", "steps": steps}], scripts=scripts, **settings)


@pytest.mark.parametrize(
    ("choose", "said", "chosen"),
    [
        ("vote", {"a": ("3", -0.1), "b": (" 4 ", -0.9), "c": ("4", -0.5)}, "c"),
        ("vote", {"a": ("3", -0.3), "b": ("4", -0.2), "c": ("5", -0.9)}, "b"),
        ("logprob", {"a": ("3", -0.1), "b": ("4", -0.9), "c": ("4", -0.5)}, "a"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_chosen_answer_is_given(
    tokenizer: Tokenizer, choose: str, said: dict[str, tuple[str, float]], chosen: str, stream: bool
) -> None:
    service = ensemble(tokenizer, choose, said)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = service.chat(model="all", **options)
    final = answer.chunks[-1] if stream else answer.json
    assert final["model"] == answer.headers["x-carousel-pipeline-model"] == chosen
    assert float(answer.headers["x-carousel-pipeline-logprob"]) == said[chosen][1]
    steps = final["usage"]["pipeline"]["steps"]
    assert {step["model"]: step["is_chosen"] for step in steps} == {name: name == chosen for name in NAMES}
    assert {step["model"]: step["mean_logprob"] for step in steps} == {
        name: pytest.approx(logprob) for name, (_, logprob) in said.items()
    }
    texts = [text.strip() for text, _ in said.values()]
    assert {step["model"]: step["votes"] for step in steps} == {
        name: texts.count(text.strip()) for name, (text, _) in said.items()
    }
    if stream:
        text = "".join(choice["delta"].get("content", "") for chunk in answer.chunks for choice in chunk["choices"])
    else:
        text = final["choices"][0]["message"]["content"]
    assert text == said[chosen][0]


def test_an_error_of_one_ends_the_others(tokenizer: Tokenizer) -> None:
    service = ensemble(tokenizer, "vote", dict.fromkeys(NAMES, ("3 4", -0.1)))
    service.script_of["b"] = lambda request: [Overloaded("full")]
    service.script_of["c"] = lambda request: [(20,), WAIT]
    assert service.chat(model="all").status == 429
    assert not service.generate.open


def test_a_cascade_may_be_one_of_them(tokenizer: Tokenizer) -> None:
    said = {"small": ("3", -0.4), "large": ("4", -0.2)}
    steps = [{"kind": "ensemble", "models": ["both", "large"], "choose": "logprob"}]
    scripts = {name: say_likely(tokenizer, *told) for name, told in said.items()}
    pipelines = [CASCADE, {"name": "all", "steps": steps}]
    service = Service(tokenizer, names=tuple(said), pipelines=pipelines, scripts=scripts)
    answer = service.chat(model="all").json
    assert answer["model"] == "large"
    told = {step["name"]: (step["model"], step["is_chosen"]) for step in answer["usage"]["pipeline"]["steps"]}
    assert told == {"both[0]": ("small", False), "all[0]": ("large", True)}


@pytest.mark.parametrize("stream", [False, True])
async def test_other_tasks_have_their_turns_while_the_chosen_answer_is_sent(tokenizer: Tokenizer, stream: bool) -> None:
    num_prompts, text = 4, "3 4 5 6 7 8 9 " * 100
    num_tokens = num_prompts * len(tokenizer.encode(text, add_special_tokens=False))
    num_turns = turns_at_end = 0

    def saying(request: Request) -> Iterable[Step]:
        nonlocal turns_at_end
        for step in say_likely(tokenizer, text, -0.1)(request):
            yield step
            turns_at_end = num_turns

    async def turning() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    service = ensemble(tokenizer, "vote", dict.fromkeys(NAMES, ("3", -0.1)), max_model_len=4000)
    service.script_of.update(dict.fromkeys(NAMES, saying))
    body = {"model": "all", "prompt": ["Hi"] * num_prompts, "max_tokens": 2000, "stream": stream}
    turning_task = asyncio.create_task(turning())
    async with Connection(service.app, "POST", "/v1/completions", body, {}) as connection:
        answer = await connection.finished()
        turns_after = num_turns - turns_at_end
    turning_task.cancel()
    assert answer.status == 200
    assert turns_after > num_tokens / MAX_TOKENS_AT_ONCE


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1, "return_token_ids": True}])
@pytest.mark.parametrize("stream", [False, True])
def test_the_chosen_answer_is_the_models_own_in_all_its_parts(
    tokenizer: Tokenizer, stream: bool, fields: dict[str, Any]
) -> None:
    service = ensemble(tokenizer, "logprob", dict.fromkeys(NAMES, ("3 4 5 6 7 8 9 " * 40, -0.1)), max_model_len=4000)
    answers = []
    for model in ("a", "all"):
        answer = service.complete(model=model, max_tokens=1000, stream=stream, **fields)
        assert answer.status == 200, answer.body
        chunks = answer.chunks if stream else [answer.json]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        answers.append(
            {
                "text": "".join(choice["text"] for choice in choices),
                "reason": choices[-1]["finish_reason"],
                "token_ids": [each for choice in choices for each in choice.get("token_ids") or ()],
                "logprobs": [each for some in logprobs for each in some["token_logprobs"]],
                "offsets": [each for some in logprobs for each in some["text_offset"]],
            }
        )
    assert answers[0] == answers[1]
    assert bool(answers[0]["logprobs"]) == bool(answers[0]["token_ids"]) == bool(fields)
