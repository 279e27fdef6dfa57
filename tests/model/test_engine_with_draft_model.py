"""Engines whose settings name a draft model: what it takes, and where it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from app.build import build_sync_engine
from app.config import EngineConfig, ReplicasConfig
from app.engine.engine import Engine
from app.engine.speculation.draft_model import ModelDrafter
from app.errors import InvalidSetup
from app.grammar.vocabulary import Vocabulary
from app.model.loader import load_runner
from app.model.planned_memory import planned_cpu_memory
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of
from tests.model.test_reloading import KV_GIB, SLEEPS, resident_gib
from tests.tiny_encoders import save_tiny_encoder


def drafting(path: Path, draft: Path | None, **model: Any) -> EngineConfig:
    speculation = {"method": "draft_model", "model": str(draft)} if draft else {}
    return config_of(path, cache={"memory_gib": KV_GIB}, speculation=speculation, **model)


def tokens_of(engine: Engine) -> list[list[int]]:
    requests = [make_request(tuple(range(5, 40)), max_tokens=24, temperature=float(n), seed=n) for n in range(2)]
    outcome = run_to_end(engine, *requests)
    return [outcome.token_ids[request.request_id] for request in requests]


def vocabulary_of(
    location: str, revision: str | None, *, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """As `read_vocabulary`, without a process of its own."""
    tokens = [b""] * vocab_size
    for text, token_id in json.loads((Path(location) / "tokenizer.json").read_text())["model"]["vocab"].items():
        tokens[token_id] = text.encode()
    return Vocabulary(tokens=tuple(tokens), special_token_ids=(), eos_token_ids=eos_token_ids)


def test_the_same_model_as_draft_model_has_half_of_the_blocks_and_nearly_all_drafts_kept(demo_path: Path) -> None:
    plain, engine = build_sync_engine(drafting(demo_path, None)), build_sync_engine(drafting(demo_path, demo_path))
    assert tokens_of(engine) == tokens_of(plain)
    stats = engine.stats()
    assert stats.num_blocks == plain.stats().num_blocks // 2
    assert stats.total_drafted_tokens > 0
    assert stats.total_accepted_tokens > 0.9 * stats.total_drafted_tokens


def test_the_memory_plan_counts_weights_step_and_kv_of_both(demo_path: Path) -> None:
    config = drafting(demo_path, demo_path)
    alone, both = planned_cpu_memory(drafting(demo_path, None)), planned_cpu_memory(config)
    assert both.needs.weights == 2 * alone.needs.weights
    assert both.needs.step == 2 * alone.needs.step
    assert both.needs.context == alone.needs.context
    assert both.block_bytes == 2 * alone.block_bytes
    assert load_runner(config).num_blocks == int(KV_GIB * 2**30) // both.block_bytes


def test_both_models_give_their_memory_up_and_have_the_same_tokens_again(demo_path: Path) -> None:
    engine = build_sync_engine(drafting(demo_path, demo_path), SLEEPS)
    before, awake = tokens_of(engine), resident_gib()
    engine.sleep()
    assert awake - resident_gib() > KV_GIB
    engine.wake()
    assert tokens_of(engine) == before
    drafter = engine._scheduler.drafter
    assert isinstance(drafter, ModelDrafter)
    assert not drafter._has_failed
    assert engine.stats().total_accepted_tokens > 0.9 * engine.stats().total_drafted_tokens


def test_a_draft_model_with_another_number_of_tokens_is_refused(
    demo_path: Path, tiny_model_path: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidSetup, match=r"has 211 tokens, but .*demo has 763, and both models need"):
        build_sync_engine(drafting(demo_path, tiny_model_path("llama")))


def test_a_draft_model_with_other_tokens_is_refused_with_their_number_and_the_first(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.grammar.vocabulary.read_vocabulary", vocabulary_of)
    folder = shutil.copytree(demo_path, tmp_path / "other")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last, before = sorted(vocabulary, key=vocabulary.__getitem__, reverse=True)[:2]
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidSetup, match=r"2 of the 763 tokens in .*other differ from those in .*; the first one"):
        build_sync_engine(drafting(demo_path, folder))


def test_it_is_refused_where_it_cannot_be_used(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidSetup, match=r"draft_model, but replicas.tensor_parallel is 2: a draft model only works"):
        build_sync_engine(drafting(demo_path, demo_path), ReplicasConfig(tensor_parallel=2))
    with pytest.raises(InvalidSetup, match="is simulated: a draft model only works with a decoder"):
        build_sync_engine(drafting(demo_path, demo_path, simulated={}))
    save_tiny_encoder("bert", tmp_path / "encoder")
    with pytest.raises(InvalidSetup, match="is an encoder: a draft model only works"):
        build_sync_engine(drafting(tmp_path / "encoder", demo_path))
    monkeypatch.setattr("app.model.device.device_of", lambda model: torch.device("cuda"))
    with pytest.raises(InvalidSetup, match=r"runs on cuda: a draft model only works .* set speculation.method to off"):
        build_sync_engine(drafting(demo_path, demo_path))


@pytest.mark.parametrize("speculation", [{"method": "draft_model"}, {"method": "lookup", "model": "some/model"}])
def test_a_draft_model_is_named_where_it_is_the_method_and_nowhere_else(speculation: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="draft_model requires a model, and the other methods do not use one"):
        EngineConfig.model_validate({"speculation": speculation})
