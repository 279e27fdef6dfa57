"""The whole way, from the `openai` package to the bundled model: what evaluations ask for, against transformers."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from app.api import RequestHandler, ServedModel, build_app
from app.build import build_engine
from app.config import ApiConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.text import Tokenizer
from tests.kit.service import openai_client

TOLERANCE = 1e-4
CONTEXTS = ("What is 12 + 30?", "2 4 6 8", "Sort: 9 3 7", "Hello", "Reverse: a b c d e f g", "é € 😀 x", "7")


@pytest.fixture(scope="module")
def reference(demo_path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float32).eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_path))


def serve(
    demo_path: Path, tokenizer: Tokenizer, use: Callable[[openai.AsyncOpenAI], Awaitable[None]], **scheduler: int
) -> None:
    """One client and one engine, without a socket."""
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(path=str(demo_path), dtype="float32", num_threads=1),
            cache=CacheConfig(block_size=16, num_blocks=200),
            scheduler=SchedulerConfig(**scheduler),
        )
    )

    async def main() -> None:
        model = ServedModel(
            name="demo",
            tokenizer=tokenizer,
            model_info=engine.model_info,
            generate=engine.generate,
            created=1_700_000_000,
        )

        async def is_ready() -> bool:
            return True

        async with openai_client(build_app(RequestHandler([model], ApiConfig()), is_ready)) as client:
            await use(client)

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()


def own_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids) - 1, vocab_size], each row of the token after."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("max_scored_tokens", "settings"), [(512, {}), (3, {"prefill_chunk_tokens": 5, "max_running": 4})], ids=str
)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_as_lm_eval_asks_for_them(
    demo_path: Path,
    tokenizer: Tokenizer,
    reference: PreTrainedModel,
    max_scored_tokens: int,
    settings: dict[str, int],
    max_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged prompts of token ids in one call; sums and greediness are computed from the answer as lm-eval does."""
    monkeypatch.setattr("app.engine.batch.MAX_SCORED_TOKENS", max_scored_tokens)
    rng = random.Random(1)
    contexts = [list(tokenizer.encode(rng.choice(CONTEXTS), add_special_tokens=False)) for _ in range(24)]
    texts = [" ".join(str(rng.randrange(100)) for _ in range(rng.randrange(1, 9))) for _ in contexts]
    prompts = [
        [*context, *tokenizer.encode(text, add_special_tokens=False)]
        for context, text in zip(contexts, texts, strict=True)
    ]

    async def use(client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(
            model="demo", prompt=prompts, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, seed=1234
        )
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        for choice, prompt, context in zip(choices, prompts, contexts, strict=True):
            assert choice.logprobs is not None
            end = len(prompt)  # lm-eval: [:-1], as it generates one token
            given, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
            assert given is not None
            assert top is not None
            assert (given[0], top[0]) == (None, None)
            assert len(given) == len(top) == len(prompt) + max_tokens
            expected = own_logprobs(reference, prompt)[len(context) - 1 :]
            own = expected.gather(-1, torch.tensor(prompt[len(context) :])[:, None]).double().sum()
            assert sum(value or 0.0 for value in given[len(context) : end]) == pytest.approx(float(own), abs=TOLERANCE)
            is_greedy = all(
                value == max(each.values())
                for value, each in zip(given[len(context) : end], top[len(context) : end], strict=True)
            )
            assert is_greedy == (expected.argmax(-1).tolist() == prompt[len(context) :])
        assert answer.usage is not None
        assert answer.usage.completion_tokens == max_tokens * len(prompts)

    serve(demo_path, tokenizer, use, **settings)


def test_sums_of_unlikely_texts_are_as_near_to_float64_as_transformers_own(
    demo_path: Path, tokenizer: Tokenizer, reference: PreTrainedModel
) -> None:
    """Sums of -500 differ by more than 1e-4: that is float32's part, transformers' no less than ours."""
    exact = AutoModelForCausalLM.from_pretrained(demo_path, dtype=torch.float64).eval()
    rng = random.Random(2)
    words = "crane wagon fluid puppet food law around rail thumb hill fort race linen shore".split()
    prompts = [
        list(tokenizer.encode(" ".join(rng.choices(words, k=rng.randrange(2, 12))), add_special_tokens=False))
        for _ in range(40)
    ]

    def summed(model: PreTrainedModel, prompt: list[int]) -> float:
        with torch.inference_mode():
            likely = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        return float(likely.gather(-1, torch.tensor(prompt[1:])[:, None]).double().sum())

    async def use(client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model="demo", prompt=prompts, max_tokens=0, logprobs=0, echo=True)
        ours, theirs = [], []
        for choice, prompt in zip(sorted(answer.choices, key=lambda choice: choice.index), prompts, strict=True):
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs is not None
            truth = summed(exact, prompt)
            ours.append(abs(sum(choice.logprobs.token_logprobs[1:]) - truth))
            theirs.append(abs(summed(reference, prompt) - truth))
        assert max(theirs) > TOLERANCE, "else these texts show nothing"
        assert statistics.mean(ours) < 2 * statistics.mean(theirs)
        assert max(ours) < 3 * max(theirs)

    serve(demo_path, tokenizer, use)


def test_text_offsets_and_tokens_of_an_echo_cover_the_text(demo_path: Path, tokenizer: Tokenizer) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        prompt = "Sort 😀: 9 3 7"
        answer = await client.completions.create(model="demo", prompt=prompt, max_tokens=6, logprobs=2, echo=True)
        [choice] = answer.choices
        found = choice.logprobs
        assert choice.text.startswith(prompt)
        assert found is not None
        assert found.tokens is not None
        assert found.text_offset is not None
        assert found.top_logprobs is not None
        assert found.text_offset == sorted(found.text_offset)
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            assert token.startswith(("bytes:", "<|")) or choice.text[offset:].startswith(token)
        assert any(token.startswith("bytes:\\x") for token in found.tokens)
        assert {len(top) for top in found.top_logprobs if top} <= {2, 3}

    serve(demo_path, tokenizer, use)


def test_chat_logprobs_whole_and_streamed_are_the_same(
    demo_path: Path, tokenizer: Tokenizer, reference: PreTrainedModel
) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": "What is 12 + 30?"}],
            "max_completion_tokens": 12,
            "logprobs": True,
            "top_logprobs": 3,
            "temperature": 0,
            "extra_body": {"return_token_ids": True},
        }
        whole = await client.chat.completions.create(**asked)
        [choice] = whole.choices
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert whole.usage is not None
        assert whole.usage.completion_tokens == len(content)
        extra: Any = choice.model_extra
        body: Any = whole.model_extra
        tokens = [*body["prompt_token_ids"], *extra["token_ids"]]
        expected = own_logprobs(reference, tokens)[-len(content) :]
        for entry, row, token_id in zip(content, expected, extra["token_ids"], strict=True):
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
                row.topk(3).values.tolist(), abs=TOLERANCE
            )
            assert entry.top_logprobs[0].logprob == entry.logprob, "greedy: the likeliest was drawn"
        assert b"".join(bytes(entry.bytes or ()) for entry in content[:-1]).decode() == choice.message.content
        stream = await client.chat.completions.create(**asked, stream=True)
        streamed = [
            entry
            async for chunk in stream
            for each in chunk.choices
            if each.logprobs
            for entry in each.logprobs.content or ()
        ]
        assert streamed == content

    serve(demo_path, tokenizer, use)
