"""The canary finds nothing in a sound service, and sings in one that leaks."""

from __future__ import annotations

import asyncio
import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from app.api import RequestHandler, ServedModel, build_app
from app.build import build_engine
from app.config import ApiConfig, EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.request import Generate, Pooling, Request, TokenDelta
from app.text import Tokenizer
from benchmarks.harness.http_call import Target
from benchmarks.service.canaries import KINDS, Secrets
from benchmarks.service.canary import Canary, Findings, figures_of
from tests.api.keys import ring
from tests.benchmarks.servers import serving

KEYS = ("sk-one", "sk-two", "sk-three")
# The others need a batch service, or processes that taste grammars.
KINDS_HERE = tuple(kind for kind in KINDS if kind not in ("batch", "choice", "schema"))


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_path))


@pytest.fixture(scope="module")
def engine(demo_path: Path) -> Iterator[AsyncEngine]:
    """Too little memory for all that may run."""
    engine = build_engine(
        EngineConfig.model_validate(
            {
                "model": {"path": str(demo_path)},
                "cache": {"num_blocks": 60, "block_size": 16},
                "scheduler": {"max_running": 16},
                "speculation": {"method": "lookup"},
            }
        )
    )
    yield engine
    engine.shutdown()


@contextmanager
def service(engine: AsyncEngine, tokenizer: Tokenizer, generate: Generate, *, share_prefixes: bool) -> Iterator[str]:
    async def is_ready() -> bool:
        return True

    model = ServedModel(
        name="demo", tokenizer=tokenizer, facts=engine.facts, generate=generate, created=0, pooling=Pooling.LAST
    )
    run = uuid.uuid4().hex  # tenants of its own: the engine, and what it has cached, is that of other tests too
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]
    keys = [{"name": f"{run}-{number}", "sha256": each} for number, each in enumerate(hashes)]
    config = ApiConfig(share_prefixes=share_prefixes)
    with serving(build_app(RequestHandler([model], config, authenticator=ring(keys)), is_ready)) as url:
        yield url


@pytest.fixture
def searched(engine: AsyncEngine, tokenizer: Tokenizer) -> Callable[..., Findings]:
    """What a canary finds in a service over this `generate`, the engine's by default."""

    def run(
        generate: Generate | None = None,
        *,
        number: int,
        at_once: int = 16,
        share_prefixes: bool = False,
        is_sound: bool = False,
    ) -> Findings:
        async def main(url: str) -> Findings:
            canary = Canary(Target.parse(url), KEYS, tokenizer, models=["demo"], seed=5)
            canary.kinds = KINDS_HERE
            await canary.ask_many(number, at_once=at_once)
            if is_sound:
                assert await canary.differing_alone() == []
            return canary.findings

        with service(engine, tokenizer, generate or engine.generate, share_prefixes=share_prefixes) as url:
            return asyncio.run(main(url))

    return run


def test_no_response_has_words_of_another_request(searched: Callable[..., Findings], engine: AsyncEngine) -> None:
    found = searched(number=90, is_sound=True)
    assert found.hits == []
    assert found.unexplained == []
    assert set(found.statuses) <= {"200", "left", "429"}, "background is refused while all slots are taken"
    assert found.sang > 0.9
    assert found.num_with_cached > 0
    assert set(found.own) == set(found.answers) == set(KINDS_HERE)
    assert all(found.own[kind] for kind in KINDS_HERE), "of every kind the search sees what is in it"
    assert engine.stats().total_preemptions > 0
    assert figures_of(found)["hits"] == 0


def test_what_is_given_to_another_is_found(searched: Callable[..., Findings], engine: AsyncEngine) -> None:
    last: list[tuple[int, ...]] = [()]
    source = random.Random(1)

    async def leaky(request: Request) -> AsyncIterator[TokenDelta]:
        prompt, last[0] = last[0], request.prompt_token_ids
        if source.random() < 0.5 and prompt:
            request = replace(request, prompt_token_ids=prompt)
        async for delta in engine.generate(request):
            yield delta

    assert len(searched(leaky, number=32).hits) > 5


def test_cached_prefixes_of_others_are_found(searched: Callable[..., Findings]) -> None:
    # One by one: what was sent before is computed by then.
    assert searched(number=20, at_once=1, share_prefixes=True).unexplained != []
    assert searched(number=20, at_once=1).unexplained == []


def test_a_mark_is_found_in_any_text_and_belongs_to_one() -> None:
    secrets = Secrets(random.Random(3))
    mine, yours = secrets.new(1), secrets.new(2)
    assert secrets.owners_in(mine.question) == {1}
    assert secrets.owners_in(f'{{"words": "{" ".join(yours.words[2:5])}"}} apple stone river') == {2}
    assert secrets.owners_in(" ".join((*mine.words[:2], *yours.words[:2]))) == set()
    assert secrets.owners_in(mine.sentence + yours.sentence) == {1, 2}
