"""A real model, read from its GGUF file: it chats in English, and its tokens are those of transformers' own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.build import build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig
from app.engine.engine import Engine
from app.engine.request import FinishReason
from app.text import Tokenizer
from tests.kit.engine import make_request, run_to_end

MAX_TOKENS = 64
CHATS = (
    ["What is the capital of France?"],
    ["Write one sentence about the sea."],
    ["Name three colours."],
    ["What is 7 plus 15?"],
    ["Translate to French: good morning"],
    ["Who wrote Romeo and Juliet?"],
    ["Give me a title for a story about a fox."],
    ["Is water wet?  Answer yes or no."],
    ["My name is Ada.", "Hello Ada! How can I help you today?", "What is my name?"],
    ["Say hello.", "Hello!", "Now say goodbye."],
)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: str) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    return [
        tokenizer.encode_chat(
            [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(chat)]
        )
        for chat in CHATS
    ]


def engine_of(path: str) -> Engine:
    model = ModelConfig(path=path, device="cpu", dtype="float32", num_threads=2)
    return build_sync_engine(EngineConfig(model=model, cache=CacheConfig(memory_gib=0.25)))


@pytest.fixture(scope="module")
def greedy(smollm2_path: str, prompts: list[tuple[int, ...]]) -> list[tuple[list[int], FinishReason]]:
    """The answers of an engine that reads the numbers of the file in float32, and why each of them ended."""
    requests = [make_request(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
    outcome = run_to_end(engine_of(smollm2_path), *requests)
    return [(outcome.token_ids[each.request_id], outcome.reasons[each.request_id]) for each in requests]


def test_its_greedy_tokens_are_those_of_transformers(
    smollm2_path: str,
    tokenizer: Tokenizer,
    prompts: list[tuple[int, ...]],
    greedy: list[tuple[list[int], FinishReason]],
) -> None:
    texts = [tokenizer.decode(answer) for answer, _ in greedy]
    assert "Paris" in texts[0]
    assert "Shakespeare" in texts[5]
    assert sum(reason is FinishReason.STOP for _, reason in greedy) >= 5, texts

    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    for (answer, _), prompt in zip(greedy, prompts, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        # Each is the most likely after those before it, so plain `generate` gives the same.
        assert answer == logits.argmax(-1).tolist()


def test_the_file_itself_answers_much_the_same(
    smollm2_file: Path, prompts: list[tuple[int, ...]], greedy: list[tuple[list[int], FinishReason]]
) -> None:
    """Its products round their inputs to eight bits, as llama.cpp does: a token in twenty is another one."""
    texts = [(*prompt, *answer) for prompt, (answer, _) in zip(prompts, greedy, strict=True)]
    requests = [make_request(text, max_tokens=0, prompt_logprobs=1) for text in texts]
    outcome = run_to_end(engine_of(str(smollm2_file)), *requests)
    same = [
        score.top_token_ids[0] == token
        for request, text, prompt in zip(requests, texts, prompts, strict=True)
        for score, token in list(zip(outcome.prompt_logprobs[request.request_id], text[1:], strict=True))[
            len(prompt) - 1 :
        ]
    ]
    assert len(same) > 200
    assert sum(same) > 0.9 * len(same)


def test_its_template_names_the_speakers(tokenizer: Tokenizer, prompts: list[tuple[int, ...]]) -> None:
    shown = tokenizer.decode(prompts[0], skip_special_tokens=False)
    assert shown == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
