"""Documents of a request: which of them a pipeline keeps, where they stand in the prompt, what the answer says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.engine.request import FinishReason, Pooling
from app.text import Tokenizer
from tests.api.test_request_trace import KeptTraces, named
from tests.kit.service import Answer, Service, bearer, by_angle, entry, without_times

RAG = {
    "name": "rag",
    "steps": [{"kind": "rerank", "model": "ranker", "top_n": 2}, {"kind": "generate", "model": "writer"}],
}
DOCUMENTS = ["Cats sleep.", "Dogs bark at the sea.", "Fish swim.", {"text": "Dogs."}]
QUESTION = "What do dogs do?"
WRITTEN = "Use these documents:\n\n[1] Dogs bark at the sea.\n\n[2] Dogs.\n\n"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}],
    },
    "/v1/completions": {"prompt": QUESTION},
    "/v1/responses": {"input": QUESTION, "instructions": "Be kind."},
    "/v1/messages": {"system": "Be kind.", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8},
}  # fmt: skip
# By what is in a text: its direction in the plane, in degrees. The question's is 0.
ANGLES = {"Dogs bark": 10.0, "Dogs.": 20.0, "Cats": 60.0, "Fish": 90.0, QUESTION: 0.0}


def rag(tokenizer: Tokenizer, script: Any = None, **settings: Any) -> Service:
    settings = {"pipelines": [RAG], "names": ("ranker", "writer"), "max_model_len": 400} | settings
    return Service(
        tokenizer, script or by_angle(tokenizer, ANGLES, reason=FinishReason.LENGTH), pooling=Pooling.LAST, **settings
    )


def ask(service: Service, path: str = "/v1/chat/completions", headers: Any = None, **fields: Any) -> Answer:
    return service.call("POST", path, {"model": "rag", "documents": DOCUMENTS} | BODIES[path] | fields, headers)


def prompts(service: Service) -> list[str]:
    """Of the requests that generate."""
    return [
        service.tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False)
        for each in service.generate.requests
        if each.pooling is None
    ]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_based_on_the_best_documents(tokenizer: Tokenizer, path: str, stream: bool) -> None:
    service = rag(tokenizer)
    answer = ask(service, path, stream=stream)
    assert answer.status == 200, answer.body
    assert answer.headers["x-carousel-pipeline-documents"] == "1,3"
    assert answer.headers["x-carousel-pipeline-model"] == "writer"
    [prompt] = prompts(service)
    plain = rag(tokenizer)
    plain.call("POST", path, {"model": "writer"} | BODIES[path])
    [without] = prompts(plain)
    assert prompt == without.replace(QUESTION, WRITTEN + QUESTION)
    if not stream:
        told = without_times(answer.json["usage"])["pipeline"]
        num_ranked = sum(len(each.prompt_token_ids) for each in service.generate.requests if each.pooling)
        kept = [{"index": 1, "score": pytest.approx(math.cos(math.radians(10)))}]
        kept.append({"index": 3, "score": pytest.approx(math.cos(math.radians(20)))})
        ranking = {"name": "rag[0]", "kind": "rerank", "model": "ranker", "completion_tokens": 0, "kept": kept}
        num_prompt = len(service.generate.requests[-1].prompt_token_ids)
        answered = {"name": "rag[1]", "kind": "generate", "model": "writer", "prompt_tokens": num_prompt}
        num_generated = len(tokenizer.encode("3 4", add_special_tokens=False))
        steps = [ranking | {"prompt_tokens": num_ranked}, answered | {"completion_tokens": num_generated}]
        assert told == {"name": "rag", "steps": steps}


def test_the_ranking_step_asks_as_rerank_does(tokenizer: Tokenizer) -> None:
    service = rag(tokenizer)
    ask(
        service, priority=3, user="me", deadline_s=60, headers={"x-carousel-session": "s", "x-carousel-preset": "batch"}
    )
    ranked = [each for each in service.generate.requests if each.pooling]
    [answered] = [each for each in service.generate.requests if not each.pooling]
    assert len(ranked) == 5
    for each in ranked:
        assert (each.pooling, each.priority, each.tenant, each.deadline_s) == (Pooling.LAST, 3, "me", 60)
        assert (each.session, each.preset) == ("s", "")
    assert (answered.session, answered.preset, answered.priority) == ("s", "batch", 3)
    assert answered.deadline_s is not None
    assert 50 < answered.deadline_s < 60


def test_a_model_alone_has_all_documents_in_its_prompt(tokenizer: Tokenizer) -> None:
    service = rag(tokenizer)
    answer = ask(service, "/v1/completions", model="writer", prompt="Hi", documents=["a", "b"])
    assert "pipeline" not in answer.json["usage"]
    written = tokenizer.encode("Use these documents:\n\n[1] a\n\n[2] b\n\nHi", add_special_tokens=True)
    assert prompts(service)[0] == tokenizer.decode(written, skip_special_tokens=False)
    assert ask(service, model="writer", documents=[]).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/v1/chat/completions", {"documents": None}, "documents", "rag ranks documents"),
        ("/v1/chat/completions", {"documents": "a"}, "documents", "a list of strings"),
        (
            "/v1/chat/completions",
            {"documents": ["a"] * 2049},
            "documents",
            "2,049 texts; this server accepts at most 2,048",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "system", "content": "a"}]},
            "documents",
            "`messages` contains none",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 900}]}, "messages", "400"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt", "a single prompt"),
        ("/v1/completions", {"prompt": [5, 6]}, "prompt", "token ids"),
        ("/v1/completions", {"prompt": [5, 6], "model": "writer"}, "prompt", "not token ids"),
        ("/v1/chat/completions", {"temperature": 9}, "temperature", "less than or equal to 2"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    service = rag(tokenizer)
    answer = ask(service, path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert words in answer.error["message"]
    assert not service.generate.requests


def test_too_long_documents_are_cut_for_the_ranking(tokenizer: Tokenizer) -> None:
    service = rag(tokenizer)
    answer = ask(service, documents=["Cats " * 900, "Dogs."], max_tokens=5)
    assert answer.status == 400  # both are kept, and the first does not fit into the prompt
    assert [len(each.prompt_token_ids) for each in service.generate.requests if each.pooling][1] == 400


def test_a_key_without_enough_tokens_for_the_answer_pays_for_the_ranking(tokenizer: Tokenizer) -> None:
    service = rag(tokenizer, keys=[entry(tokens_per_minute=100)])
    answer = ask(service, headers=bearer(), max_tokens=90)
    assert answer.status == 429
    assert not prompts(service)
    account = service.handler.authenticator.account_named(entry()["name"])
    assert account.usage.num_tokens == sum(len(each.prompt_token_ids) for each in service.generate.requests)


def test_a_trace_has_a_span_for_each_step(tokenizer: Tokenizer) -> None:
    service, kept = rag(tokenizer), KeptTraces()
    service.handler.tracer = kept
    service.app = service.built()
    ask(service)
    [trace] = kept.traces
    [check], [ranking], [answering] = (named(trace, each) for each in ("check", "rerank rag[0]", "generate rag[1]"))
    assert check.ended_ns <= ranking.began_ns <= ranking.ended_ns <= answering.began_ns <= answering.ended_ns
    assert ranking.attributes == {"gen_ai.request.model": "ranker"}
    assert answering.ended_ns == trace.ended_ns
