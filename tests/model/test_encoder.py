"""Encoders and cross-encoders: packed steps give what transformers gives for each text alone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from app.build import build_sync_engine
from app.config import ReplicasConfig
from app.engine.engine import Engine
from app.engine.request import Pooling, Request
from app.errors import InvalidRequest, InvalidSetup, UnsupportedModel
from tests.kit.engine import Outcome, make_request, run_to_end
from tests.kit.models import config_of, relative_error
from tests.tiny_encoders import (
    CROSS_ENCODERS,
    ENCODERS,
    NUM_POSITIONS,
    PADDING,
    VOCAB_SIZE,
    save_tiny_encoder,
    write_pooling,
)

TOLERANCE = 1e-4


def build(folder: Path, *, max_step_tokens: int = 100, **model: Any) -> Engine:
    scheduler = {"max_running": 33, "max_step_tokens": max_step_tokens, "prefill_chunk_tokens": 8}
    return build_sync_engine(config_of(folder, scheduler=scheduler, **{"dtype": "float32", "num_threads": 1} | model))


def some_requests(pooling: Pooling | None, *, are_pairs: bool = False, number: int = 24) -> list[Request]:
    """Ragged lengths; without a pooling they take turns. A text may name the token for padding."""
    rng = random.Random(7)
    ways = (Pooling.MEAN, Pooling.CLS, Pooling.LAST)
    requests = []
    for index in range(number):
        prompt = tuple(rng.randrange(PADDING, VOCAB_SIZE) for _ in range(rng.randrange(2, 60)))
        request = make_request(prompt, pooling=pooling or ways[index % 3], max_tokens=0)
        requests.append(replace(request, second_text_at=rng.randrange(1, len(prompt)) if are_pairs else 0))
    return requests


def alone(model: PreTrainedModel, request: Request, *, has_types: bool) -> Any:
    given = {"input_ids": torch.tensor([request.prompt_token_ids])}
    if has_types:
        num_tokens, at = len(request.prompt_token_ids), request.second_text_at
        given["token_type_ids"] = torch.tensor([[0] * at + [1] * (num_tokens - at) if at else [0] * num_tokens])
    with torch.inference_mode():
        return model(**given)


def vector_of(outcome: Outcome, request: Request) -> torch.Tensor:
    return torch.tensor(array("f", outcome.embeddings[request.request_id]))


def pooled(states: torch.Tensor, pooling: Pooling | None) -> torch.Tensor:
    return {Pooling.CLS: states[0], Pooling.LAST: states[-1], Pooling.MEAN: states.mean(dim=0)}[pooling or Pooling.MEAN]


@pytest.mark.parametrize("kind", ENCODERS)
def test_states_are_the_models_own_in_packed_steps(kind: str, tmp_path: Path) -> None:
    model = save_tiny_encoder(kind, tmp_path)
    engine = build(tmp_path)
    requests = some_requests(None, are_pairs=kind == "bert")
    outcome = run_to_end(engine, *requests)
    for request in requests:
        output = alone(model, request, has_types=kind == "bert")
        expected = pooled(output.last_hidden_state[0], request.pooling)
        assert relative_error(vector_of(outcome, request), expected) <= TOLERANCE, request
    assert engine.stats().total_steps < len(requests) / 1.5


@pytest.mark.parametrize("kind", CROSS_ENCODERS)
def test_scores_are_the_sigmoid_of_the_models_own_logits(kind: str, tmp_path: Path) -> None:
    model = save_tiny_encoder(kind, tmp_path, num_labels=1)
    requests = some_requests(Pooling.SCORE, are_pairs=True)
    outcome = run_to_end(build(tmp_path), *requests)
    scores = []
    for request in requests:
        [expected] = alone(model, request, has_types=kind in ("bert", "electra")).logits[0].sigmoid().tolist()
        [score] = vector_of(outcome, request).tolist()
        assert abs(score - expected) <= TOLERANCE
        scores.append(score)
    assert max(scores) - min(scores) > 0.05, "equal scores would show nothing"


@pytest.mark.parametrize("kind", ["bert", "distilbert", "llama"])
@pytest.mark.parametrize("problem_type", [None, "multi_label_classification"])
def test_each_label_of_a_classifier_has_its_probability(kind: str, problem_type: str | None, tmp_path: Path) -> None:
    model = save_tiny_encoder(
        kind, tmp_path, num_labels=3, problem_type=problem_type, id2label={0: "code", 1: "poem", 2: "talk"}
    )
    engine = build(tmp_path)
    assert (engine.model_info.labels, engine.model_info.scores_pairs) == (("code", "poem", "talk"), False)
    requests = some_requests(Pooling.SCORE)
    outcome = run_to_end(engine, *requests)
    found = []
    for request in requests:
        logits = alone(model, request, has_types=kind == "bert").logits[0]
        expected = logits.softmax(dim=0) if problem_type is None else logits.sigmoid()
        scores = vector_of(outcome, request)
        assert (scores - expected).abs().max() <= TOLERANCE
        found.append(scores)
    assert (torch.stack(found).amax(dim=0) - torch.stack(found).amin(dim=0)).min() > 0.02, "equal ones show nothing"


def test_a_request_may_ask_for_logits_beside_others_that_ask_for_scores(tmp_path: Path) -> None:
    model = save_tiny_encoder("bert", tmp_path, num_labels=3)
    requests = [
        replace(each, pooling=(Pooling.SCORE, Pooling.LOGIT)[at % 2])
        for at, each in enumerate(some_requests(Pooling.SCORE))
    ]
    outcome = run_to_end(build(tmp_path), *requests)
    for request in requests:
        logits = alone(model, request, has_types=True).logits[0]
        expected = logits if request.pooling == Pooling.LOGIT else logits.softmax(dim=0)
        assert (vector_of(outcome, request) - expected).abs().max() <= TOLERANCE


def test_a_model_may_leave_its_logits_as_they_are(tmp_path: Path) -> None:
    names = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.1.0"}
    model = save_tiny_encoder("bert", tmp_path, num_labels=1, sentence_transformers=names)
    request = some_requests(Pooling.SCORE, are_pairs=True, number=1)[0]
    [score] = vector_of(run_to_end(build(tmp_path), request), request).tolist()
    assert score == pytest.approx(alone(model, request, has_types=True).logits.item(), abs=TOLERANCE)


def test_a_prompt_above_the_budget_has_a_step_of_its_own_and_no_block_is_ever_used(tmp_path: Path) -> None:
    save_tiny_encoder("bert", tmp_path)
    engine = build(tmp_path, max_step_tokens=33)
    requests = [make_request((5,) * 70, pooling=Pooling.MEAN, max_tokens=0)]
    requests += [make_request((6,) * 10, pooling=Pooling.MEAN, max_tokens=0) for _ in range(6)]
    outcome = run_to_end(engine, *requests)
    assert outcome.embeddings.keys() == {request.request_id for request in requests}
    stats = engine.stats()
    assert (stats.total_steps, stats.num_blocks, stats.num_free_blocks) == (3, 0, 0)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_the_longest_text_fits_and_one_token_more_is_refused(kind: str, tmp_path: Path) -> None:
    model = save_tiny_encoder(kind, tmp_path)
    engine = build(tmp_path)
    longest = NUM_POSITIONS - (PADDING + 1 if kind == "roberta" else 0)
    assert engine.model_info.max_model_len == longest
    request = make_request((9,) * longest, pooling=Pooling.LAST, max_tokens=0)
    expected = alone(model, request, has_types=False).last_hidden_state[0, -1]
    assert relative_error(vector_of(run_to_end(engine, request), request), expected) <= TOLERANCE
    with pytest.raises(InvalidRequest, match=f"{longest + 1} tokens"):
        engine.add(make_request((9,) * (longest + 1), pooling=Pooling.LAST, max_tokens=0))


def test_what_an_encoder_cannot_do_is_refused(tmp_path: Path) -> None:
    save_tiny_encoder("bert", tmp_path / "encoder")
    save_tiny_encoder("bert", tmp_path / "pairs", num_labels=1)
    encoder, pairs = build(tmp_path / "encoder"), build(tmp_path / "pairs")
    assert (encoder.model_info.generates, encoder.model_info.embedding_size, encoder.model_info.scores_pairs) == (
        False,
        32,
        False,
    )
    assert (pairs.model_info.generates, pairs.model_info.embedding_size, pairs.model_info.scores_pairs) == (
        False,
        None,
        True,
    )
    with pytest.raises(InvalidRequest, match="generates no text"):
        encoder.add(make_request(max_tokens=1))
    with pytest.raises(InvalidRequest, match="does not support scores for pairs"):
        encoder.add(make_request(pooling=Pooling.SCORE, max_tokens=0))
    with pytest.raises(InvalidRequest, match="does not support embeddings"):
        pairs.add(make_request(pooling=Pooling.MEAN, max_tokens=0))


@pytest.mark.parametrize(("modes", "pooling"), [(("cls_token",), Pooling.CLS), (("mean_tokens",), Pooling.MEAN)])
def test_the_files_of_sentence_transformers_say_how_vectors_are_made(
    modes: tuple[str, ...], pooling: Pooling, tmp_path: Path
) -> None:
    save_tiny_encoder("bert", tmp_path)
    assert build(tmp_path).model_info.pooling == Pooling.MEAN
    write_pooling(tmp_path, *modes, max_length=50)
    model_info = build(tmp_path).model_info
    assert (model_info.pooling, model_info.max_model_len) == (pooling, 50)
    assert build(tmp_path, max_model_len=60).model_info.max_model_len == 60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda folder: write_pooling(folder, "max_tokens"),
            "pools by max_tokens; only cls, mean and last are supported",
        ),
        (lambda folder: write_pooling(folder, "cls_token", "mean_tokens"), "pools by cls_token, mean_tokens"),
        (
            lambda folder: write_pooling(folder, "cls_token", module="Dense"),
            "a module that is not supported: Dense",
        ),
        (lambda folder: save_tiny_encoder("mistral", folder, num_labels=1), "attention needs sliding_window"),
        (
            lambda folder: save_tiny_encoder(
                "bert", folder, num_labels=1, sentence_transformers={"activation_fn": "os.system"}
            ),
            "computes scores with os.system; only",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    save_tiny_encoder("bert", tmp_path)
    change(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        build(tmp_path)


def test_settings_for_models_that_generate_are_refused(tmp_path: Path) -> None:
    save_tiny_encoder("bert", tmp_path)
    with pytest.raises(InvalidSetup, match=r"model\.quantization is int8, which encoders such as .* do not support"):
        build(tmp_path, quantization="int8")
    with pytest.raises(InvalidSetup, match="tensor_parallel is 2"):
        build_sync_engine(config_of(tmp_path), ReplicasConfig(tensor_parallel=2))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    save_tiny_encoder("bert", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"BertModel"', '"BertForSequenceClassification"').replace(
            "{", '{"id2label": {"0": "score"}, "label2id": {"score": 0},', 1
        )
    )
    with pytest.raises(UnsupportedModel, match=r"lack 2 weights, such as classifier\.bias"):
        build(tmp_path)
