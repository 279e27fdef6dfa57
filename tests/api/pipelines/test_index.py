"""An index: which documents are found, when their vectors are computed, and what is refused at start."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from app.api import fill_indexes
from app.api.pipelines import index as index_module
from app.api.pipelines import run as run_module
from app.api.pipelines import vectors as vectors_module
from app.api.pipelines.index import IndexStep, read_index
from app.engine.request import Pooling, Request
from app.errors import InvalidSetup, Overloaded
from app.text import Tokenizer
from tests.kit.service import WAIT, Answer, Connection, Script, Service, Step, by_angle, say_likely
from tests.waiting import until

LINES = [{"text": "Cats sleep.", "id": "cats"}, {"text": "Dogs bark.", "id": "dogs"}, {"text": "Fish swim."}]
ANGLES = {"Dogs": 10.0, "Cats": 60.0, "Fish": 90.0, "barks": 0.0}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def computing(
    tokenizer: Tokenizer, *, turned: float = 0.0, num_refusals: int = 0, retry_after_s: float = 0.001
) -> Script:
    """Vectors by what is in a text, turned by some degrees: other weights turn them otherwise."""
    script = by_angle(tokenizer, {words: angle + turned for words, angle in ANGLES.items()})
    refusals = iter([Overloaded("full", retry_after_s=retry_after_s)] * num_refusals)

    def refusing(request: Request) -> Iterable[Step]:
        refusal = next(refusals, None) if request.pooling else None
        return script(request) if refusal is None else [refusal]

    return refusing


def indexed(
    tokenizer: Tokenizer,
    folder: Path,
    script: Any,
    steps: Iterable[Any] = (),
    lines: Iterable[Any] = LINES,
) -> Service:
    file = folder / "documents.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    embed = {"kind": "embed", "model": "finder", "top_n": 2, "index": str(file)}
    pipelines = [{"name": "rag", "steps": [embed, *steps, {"kind": "generate", "model": "writer"}]}]
    return Service(tokenizer, script, names=("finder", "writer"), pipelines=pipelines, pooling=Pooling.LAST)


def ask(service: Service, **fields: Any) -> Answer:
    return service.chat(model="rag", messages=[{"role": "user", "content": "What barks?"}], **fields)


def num_embedded(service: Service) -> int:
    return sum(each.pooling is not None for each in service.generate.requests)


def test_the_nearest_documents_are_in_the_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = indexed(tokenizer, tmp_path, computing(tokenizer))
    answer = ask(service)
    assert answer.status == 200, answer.body
    [found, answered] = answer.json["usage"]["pipeline"]["steps"]
    assert (found["kind"], found["model"], answered["model"]) == ("embed", "finder", "writer")
    assert found["kept"] == [
        {"index": 1, "id": "dogs", "score": pytest.approx(math.cos(math.radians(10)), abs=1e-6)},
        {"index": 0, "id": "cats", "score": pytest.approx(0.5, abs=1e-6)},
    ]
    assert answer.headers["x-carousel-pipeline-documents"] == "dogs,cats"
    prompt = tokenizer.decode(service.generate.requests[-1].prompt_token_ids)
    assert "[1] Dogs bark.\n\n[2] Cats sleep.\n\nWhat barks?" in prompt


def test_vectors_are_computed_once_in_the_background_and_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    service = indexed(tokenizer, tmp_path, computing(tokenizer, num_refusals=2))
    asyncio.run(fill_indexes(service.pipelines))
    own = [each for each in service.generate.requests if each.is_background]
    assert len(own) == len(service.generate.requests) >= len(LINES)
    before = len(own)
    for _ in range(2):
        assert ask(service).status == 200
    assert num_embedded(service) == before + 2  # the questions
    again = indexed(tokenizer, tmp_path, computing(tokenizer))
    [step] = again.pipelines[0].ranking
    assert isinstance(step, IndexStep)
    kept = asyncio.run(step.index.matrix())
    assert kept.shape == (3, 2)
    assert ask(again).headers["x-carousel-pipeline-documents"] == "dogs,cats"


def test_vectors_of_other_weights_are_computed_anew(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(fill_indexes(indexed(tokenizer, tmp_path, computing(tokenizer)).pipelines))
    changed = indexed(tokenizer, tmp_path, computing(tokenizer, turned=30.0))
    with caplog.at_level("INFO", logger="app.api.pipelines.index"):
        assert ask(changed).json["usage"]["pipeline"]["steps"][0]["kept"][0]["score"] == pytest.approx(
            math.cos(math.radians(10)), abs=1e-6
        )
    assert "the weights of finder have changed" in caplog.text


@pytest.mark.parametrize(
    ("name", "header"),
    [("\u732b", "%E7%8C%AB"), ("a\r\nx-evil: 1", "a%0D%0Ax-evil: 1"), ("a,b%", "a%2Cb%25"), ("b 1/2:x", "b 1/2:x")],
)
def test_whatever_the_id_of_a_document_is_it_adds_nothing_to_the_headers(
    tokenizer: Tokenizer, tmp_path: Path, name: str, header: str
) -> None:
    lines = [line | {"id": name} for line in LINES]
    answer = ask(indexed(tokenizer, tmp_path, computing(tokenizer), lines=lines))
    assert answer.headers["x-carousel-pipeline-documents"] == f"{header},{header}"
    assert [each["id"] for each in answer.json["usage"]["pipeline"]["steps"][0]["kept"]] == [name] * 2


def test_so_many_ids_of_documents_are_in_the_headers_as_fit(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "MAX_DOCUMENTS_HEADER", 8)
    answer = ask(indexed(tokenizer, tmp_path, computing(tokenizer)))
    assert answer.headers["x-carousel-pipeline-documents"] == "dogs"


@pytest.mark.parametrize("choose", ["one", "two"])
def test_side_by_side_each_pipeline_reports_its_own_documents(
    tokenizer: Tokenizer, tmp_path: Path, choose: str
) -> None:
    """Both ask for their documents before the first has its own."""
    indexed(tokenizer, tmp_path, computing(tokenizer))  # for the file
    file = str(tmp_path / "documents.jsonl")
    pipelines = [
        {
            "name": name,
            "steps": [
                {"kind": "embed", "model": "finder", "top_n": top_n, "index": file},
                {"kind": "generate", "model": f"of {name}".replace(" ", "-")},
            ],
        }
        for name, top_n in (("one", 1), ("two", 3))
    ]
    pipelines.append({"name": "both", "steps": [{"kind": "ensemble", "models": ["one", "two"], "choose": "logprob"}]})
    likely = {name: -0.1 if name == choose else -0.9 for name in ("one", "two")}
    service = Service(
        tokenizer,
        names=("finder", "of-one", "of-two"),
        scripts={"finder": computing(tokenizer)}
        | {f"of-{name}": say_likely(tokenizer, "3 4", logprob) for name, logprob in likely.items()},
        pipelines=pipelines,
        pooling=Pooling.LAST,
    )
    answer = service.chat(model="both", messages=[{"role": "user", "content": "What barks?"}])
    assert answer.status == 200, answer.body
    kept = {
        step["name"]: [each["index"] for each in step["kept"]]
        for step in answer.json["usage"]["pipeline"]["steps"]
        if "kept" in step
    }
    assert kept == {"one[0]": [1], "two[0]": [1, 0, 2]}
    expected = {"one": "dogs", "two": "dogs,cats,2"}[choose]
    assert answer.headers["x-carousel-pipeline-documents"] == expected


async def test_a_long_refusal_does_not_stop_own_vectors(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs them waits for them, so what a flood of others has made of `Retry-After` is not waited for."""
    pauses: list[float] = []

    async def noted(pause_s: float) -> None:
        pauses.append(pause_s)

    service = indexed(tokenizer, tmp_path, computing(tokenizer, num_refusals=2, retry_after_s=4000))
    monkeypatch.setattr(vectors_module.asyncio, "sleep", noted)
    await fill_indexes(service.pipelines)
    [step] = service.pipelines[0].ranking
    assert isinstance(step, IndexStep)
    assert (await step.index.matrix()).shape == (3, 2)
    assert max(pauses) <= 1.0


def test_documents_found_may_be_ranked_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rerank = {"kind": "rerank", "model": "finder", "top_n": 1}
    service = indexed(tokenizer, tmp_path, computing(tokenizer), [rerank])
    steps = ask(service).json["usage"]["pipeline"]["steps"]
    assert [each["id"] for each in steps[1]["kept"]] == ["dogs"]


def test_own_documents_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    answer = ask(indexed(tokenizer, tmp_path, computing(tokenizer)), documents=["a"])
    assert (answer.status, answer.error["param"]) == (400, "documents")
    assert "from an index" in answer.error["message"]


async def test_a_request_that_comes_too_early_is_told_how_far_it_is(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def waiting(request: Request) -> Iterable[Step]:
        return [WAIT] if request.is_background else computing(tokenizer)(request)

    service = indexed(tokenizer, tmp_path, waiting)
    body = {"model": "rag", "messages": [{"role": "user", "content": "What barks?"}]}

    filling = asyncio.create_task(fill_indexes(service.pipelines))
    await until(lambda: bool(service.generate.open))
    async with Connection(service.app, "POST", "/v1/chat/completions", body, {}) as connection:
        answer = await connection.finished()
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    assert answer.status == 503
    assert "0 of 3 are ready; try again" in answer.error["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has 0 documents"),
        ('{"text": "a"}\n{"text": ', "documents.jsonl:2 is not valid JSON"),
        ('{"text": "a"}\n\n["a"]', "documents.jsonl:3 must be an object"),
        ('{"text": " "}', "with a text"),
        ('{"text": "a", "id": {}}', "an id that is neither"),
        ('{"text": "a", "id": "' + "b" * 257 + '"}', "an id of 257 characters; at most 256"),
        ('{"text": "a", "id": "\\ud800"}', "half of a surrogate pair"),
        ('{"text": "\\udfff"}', "half of a surrogate pair"),
        ('{"text": "a"}\n' * 4, "has 4 documents; an index must have 1 to 3"),
        ('{"text": "' + "a" * 400 + '"}', "bytes; an index may have at most 300"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: str
) -> None:
    monkeypatch.setattr(index_module, "MAX_INDEX_DOCUMENTS", 3)
    monkeypatch.setattr(index_module, "MAX_INDEX_BYTES", 300)
    file = tmp_path / "documents.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidSetup) as refused:
        read_index(str(file))
    assert words in refused.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match="cannot be read"):
        read_index(str(tmp_path / "none.jsonl"))
