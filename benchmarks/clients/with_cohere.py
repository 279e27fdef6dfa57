"""cohere: the rerank endpoint in both versions of its API, and a request body from Jina's documentation."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from functools import partial

import cohere

from benchmarks.clients.checks import BASE_URL, MODEL, expect, raised, run

DOCUMENTS = ["seven plus two", "a red house", "the colour of the sky is blue", "Name a colour."]
QUERY = "Name a colour."
_WHERE = {"api_key": "none", "base_url": BASE_URL}
v2 = cohere.ClientV2(**_WHERE)


def rerank() -> None:
    answer = v2.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    scores = [result.relevance_score for result in answer.results]
    expect(sorted(result.index for result in answer.results) == [0, 1, 2, 3], answer)
    expect(scores == sorted(scores, reverse=True), scores)
    expect(answer.results[0].index == 3 and abs(scores[0] - 1.0) < 1e-5, "a text fits itself best")
    expect(answer.meta is not None and answer.meta.tokens.input_tokens > 0, answer.meta)


def the_best_of_cut_documents() -> None:
    answer = v2.rerank(model=MODEL, query=QUERY, documents=["red " * 5000, *DOCUMENTS], top_n=2, max_tokens_per_doc=64)
    expect(len(answer.results) == 2 and answer.results[0].index == 4, answer)


def the_first_version() -> None:
    client = cohere.Client(**_WHERE)
    answer = client.rerank(model=MODEL, query=QUERY, documents=[{"text": text} for text in DOCUMENTS],
                           return_documents=True)  # fmt: skip
    expect(answer.results[0].document.text == QUERY, answer)


def asynchronous() -> None:
    async def ask() -> list[int]:
        async with cohere.AsyncClientV2(**_WHERE) as client:
            answers = await asyncio.gather(
                *(client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS) for _ in range(8))
            )
        return [answer.results[0].index for answer in answers]

    expect(asyncio.run(ask()) == [3] * 8, "eight equal answers")


def an_error_is_typed() -> None:
    asked = partial(v2.rerank, model="no-such-model", query=QUERY, documents=DOCUMENTS)
    error = raised(cohere.errors.NotFoundError, asked)
    expect("no-such-model" in str(error.body), error.body)


def as_jina_writes_it() -> None:
    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    request = urllib.request.Request(
        f"{BASE_URL}/v1/rerank", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    expect(answer["usage"]["total_tokens"] > 0, answer)
    best, _ = answer["results"]
    expect(best["document"] == {"text": QUERY}, answer)


if __name__ == "__main__":
    run(rerank, the_best_of_cut_documents, the_first_version, asynchronous, an_error_is_typed, as_jina_writes_it)
