"""Bulk items whose results are made of numbers: the results and the errors of the same bodies over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.api import RequestHandler
from app.api.endpoints.table import BULK_URLS
from app.build import build_sync_engine
from app.config import ApiConfig, EngineConfig, ModelConfig
from app.engine.async_engine import AsyncEngine
from app.engine.engine import Engine
from app.engine.request import Pooling
from app.errors import Failure
from app.jobs.job import InvalidItem, Item, ItemOutput
from app.text import Tokenizer
from benchmarks.service.field_bodies import minimal_bodies
from deployments.bulk.engine_worker import EngineWorker, PreparedItem
from deployments.bulk.pipeline import prepare_row
from tests.kit.engine import MadeMatchers
from tests.kit.service import Service
from tests.tiny_encoders import save_tiny_encoder

READOUT_URLS = {url for url, generates in BULK_URLS.items() if not generates}
WORDS = ["One", "Once upon", "A tale of two"]
BODIES = [(url, body) for url, body in minimal_bodies().items() if url in READOUT_URLS] + [
    ("/v1/embeddings", {"input": "Once upon"}),
    ("/v1/embeddings", {"input": [[7, 8, 9]], "dimensions": 1, "encoding_format": "base64", "normalize": False}),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/rerank", {"query": "Once", "documents": WORDS}),
    ("/v1/rerank", {"query": "Once", "documents": WORDS * 40, "top_n": 3, "return_documents": True}),
    ("/v1/score", {"text_1": "Once", "text_2": WORDS}),
    ("/v1/score", {"queries": WORDS, "documents": WORDS[::-1], "max_tokens_per_doc": 1}),
]
WRONG = [
    ("/v1/embeddings", {"input": "Once", "dimensions": 9}),
    ("/v1/embeddings", {"input": [""]}),
    ("/v1/embeddings", {}),
    ("/v1/rerank", {"query": "Once", "documents": []}),
    ("/v1/rerank", {"query": "Once", "documents": ["a " * 9000]}),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}),
    ("/v1/score", {"text_1": "a", "text_2": ["b"], "items": ["c"]}),
]


class Models:
    """One model twice: behind HTTP, and on the engine of a bulk run."""

    def __init__(self, path: Path, *engines: Engine) -> None:
        self._online, self._worker = AsyncEngine(engines[0], max_requests=500), engines[1]
        tokenizer, model_info = Tokenizer.load(str(path)), engines[0].model_info
        pooling = None if model_info.embedding_size is None else Pooling(model_info.pooling or Pooling.LAST)
        self.service = Service(tokenizer, generate=self._online.generate, pooling=pooling)
        model = replace(self.service.models[0], model_info=model_info)
        self.service.handler = RequestHandler([model], ApiConfig())
        self.service.app = self.service.built()
        self._offline = EngineWorker(engines[1], tokenizer, MadeMatchers())

    def bulk(self, url: str, body: dict[str, Any]) -> InvalidItem | ItemOutput:
        """The result of an item, which crosses processes twice."""
        item = asyncio.run(prepare_row(Item(number=7, id="a", url=url, body=body), self.service.handler))
        if isinstance(item, InvalidItem):
            return item
        self._offline.add([pickle.loads(pickle.dumps(item))])
        [output] = self._offline.collect(at_least=1, within_s=20).outputs
        return pickle.loads(pickle.dumps(output))  # type: ignore[no-any-return]

    def close(self) -> None:
        self._online.shutdown()
        self._offline.close()


@contextmanager
def models(path: Path, **settings: Any) -> Iterator[Models]:
    """A model of this folder; `labels` are added to those of the model."""
    labels = settings.pop("labels", ())
    config = EngineConfig(model=ModelConfig(path=str(path), dtype="float32", device="cpu", **settings))
    engines = [build_sync_engine(config) for _ in range(2)]
    for engine in engines:
        engine.model_info = replace(engine.model_info, labels=engine.model_info.labels or labels)
    both = Models(path, *engines)
    try:
        yield both
    finally:
        both.close()


@pytest.fixture(scope="module")
def simulated(demo_path: Path) -> Iterator[Models]:
    """Its numbers follow from the tokens alone. It has labels too, one for each number."""
    with models(demo_path, simulated={"step_ms": 0, "embedding_size": 2}, labels=("glad", "sad")) as both:
        yield both


def rows(answer: dict[str, Any]) -> list[Any]:
    """The list in a response."""
    [found] = [value for value in answer.values() if isinstance(value, list)]
    return found


def test_every_endpoint_that_generates_no_text_has_a_body_here() -> None:
    assert {url for url, _ in BODIES} == READOUT_URLS


@pytest.mark.parametrize(("url", "body"), BODIES, ids=str)
def test_an_item_has_the_result_that_a_client_would_get(simulated: Models, url: str, body: dict[str, Any]) -> None:
    answer = simulated.service.call("POST", url, body)
    assert answer.status == 200, answer.body
    found = simulated.bulk(url, body)
    assert isinstance(found, ItemOutput), found
    assert found.error is None
    result = json.loads(str(found.text))
    assert (result if isinstance(result, list) else [result]) == rows(answer.json)
    usage = answer.json["usage"]
    assert found.prompt_tokens == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert (found.finish_reason, found.completion_tokens) == ("stop", usage.get("output_tokens", 0))


@pytest.mark.parametrize(("url", "body"), WRONG, ids=str)
def test_an_item_has_the_error_that_a_client_would_get(simulated: Models, url: str, body: dict[str, Any]) -> None:
    answer = simulated.service.call("POST", url, body)
    assert answer.status == 400, answer.body
    found = simulated.bulk(url, body)
    assert isinstance(found, InvalidItem), found
    assert found.reason == answer.error["message"]


@pytest.mark.parametrize(
    ("num_labels", "bodies"),
    [
        (0, [BODIES[-1], ("/v1/embeddings", {"input": "w10 w11 w12"})]),
        (1, [(url, {**body, "use_activation": on}) for url, body in BODIES[-4:] for on in (True, False)]),
        (3, [("/v1/classify", {"input": "w10 w11"}), ("/v1/classify", {"input": ["w12"], "activation": False})]),
    ],
    ids=["vectors", "pairs", "labels"],
)
def test_an_encoder_gives_items_what_it_gives_clients(tmp_path: Path, num_labels: int, bodies: list[Any]) -> None:
    save_tiny_encoder("bert", tmp_path, num_labels=num_labels)
    with models(tmp_path) as both:
        for url, body in bodies:
            found, answer = both.bulk(url, body), both.service.call("POST", url, body)
            assert isinstance(found, ItemOutput), found
            result = json.loads(str(found.text))
            for own, theirs in zip(result if isinstance(result, list) else [result], rows(answer.json), strict=True):
                assert own == {name: _nearly(value) for name, value in theirs.items()}


def _nearly(value: Any) -> Any:
    is_number = isinstance(value, float) or (isinstance(value, list) and isinstance(value[0], float))
    return pytest.approx(value, abs=1e-6) if is_number else value


@pytest.mark.parametrize(("url", "body"), [BODIES[-7], BODIES[-4], BODIES[-2]], ids=str)
def test_a_result_of_numbers_that_are_none_is_a_failure(simulated: Models, url: str, body: dict[str, Any]) -> None:
    item = asyncio.run(prepare_row(Item(number=7, id="a", url=url, body=body), simulated.service.handler))
    assert isinstance(item, PreparedItem)
    assert item.text_of_numbers is not None
    with pytest.raises(Failure, match="the model returned a vector of length nan"):
        item.text_of_numbers([np.full(2, math.nan, np.float32) for _ in item.requests])
