"""The bundled model does what its card says, through the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.build import build_sync_engine
from app.config import EngineConfig, ModelConfig, SchedulerConfig
from app.text import Tokenizer
from tests.demo_tasks import EXACT_KINDS, FALLBACK, Question, mixed_questions
from tests.kit.engine import make_request, run_to_end


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.load(str(demo_path))


def answers(demo_path: Path, tokenizer: Tokenizer, prompts: list[str], dtype: str = "float32") -> list[str]:
    engine = build_sync_engine(
        EngineConfig(
            model=ModelConfig(path=str(demo_path), device="cpu", dtype=dtype, num_threads=2),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_running=64),
        )
    )
    requests = [
        make_request(tokenizer.encode_chat([{"role": "user", "content": prompt}]), max_tokens=400) for prompt in prompts
    ]
    token_ids = run_to_end(engine, *requests).token_ids
    return [tokenizer.decode(token_ids[request.request_id]) for request in requests]


def share_right(given_answers: list[str], questions: list[Question]) -> float:
    return sum(a == q.answer for a, q in zip(given_answers, questions, strict=True)) / len(questions)


def test_it_answers_98_percent_of_500_questions(demo_path: Path, tokenizer: Tokenizer) -> None:
    questions = mixed_questions(500, seed=1)
    assert {question.kind for question in questions} == set(EXACT_KINDS)
    assert share_right(answers(demo_path, tokenizer, [q.prompt for q in questions]), questions) >= 0.98


def test_it_answers_in_bfloat16_too(demo_path: Path, tokenizer: Tokenizer) -> None:
    questions = mixed_questions(50, seed=2)
    assert share_right(answers(demo_path, tokenizer, [q.prompt for q in questions], "bfloat16"), questions) >= 0.9


def test_stories_are_50_to_300_tokens_long_and_about_what_was_asked(demo_path: Path, tokenizer: Tokenizer) -> None:
    questions = mixed_questions(18, seed=3, kinds=("story",))
    told = answers(demo_path, tokenizer, [q.prompt for q in questions])
    lengths = [len(tokenizer.encode(story, add_special_tokens=False)) for story in told]
    assert share_right(told, questions) >= 0.9
    assert min(lengths) >= 50
    assert max(lengths) <= 300
    assert max(lengths) > 2 * min(lengths)


def test_to_anything_else_it_says_what_it_can_do(demo_path: Path, tokenizer: Tokenizer) -> None:
    assert answers(demo_path, tokenizer, ["Hello, who are you?"]) == [FALLBACK]


@given(text=st.text())
def test_any_text_encodes_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
