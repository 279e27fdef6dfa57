"""Models with attention of their own: the tokens are those of `generate`, from keys and values in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.build import build_sync_engine
from app.errors import InvalidSetup, UnsupportedModel
from app.model.forward import SequentialForward
from app.model.runner import TorchModelRunner
from tests.kit.engine import run_to_end
from tests.kit.models import config_of, generate_plainly, load
from tests.model.test_equivalence import random_requests
from tests.tiny_models import VOCAB_SIZE, save_random_model

OWN: dict[str, dict[str, Any]] = {
    "bloom": {},  # ALiBi
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
}


@pytest.mark.parametrize("model_type", OWN)
def test_tokens_are_those_of_generate_with_chunks_preemption_and_prefix_hits(model_type: str, tmp_path: Path) -> None:
    path = save_random_model(tmp_path, model_type, **OWN[model_type])
    requests = random_requests(6, VOCAB_SIZE)
    expected = generate_plainly(path, requests)
    assert len({token for tokens in expected.values() for token in tokens}) > 10, "tokens vary"
    engine = build_sync_engine(
        config_of(
            path, cache={"num_blocks": 12}, num_threads=1, dtype="float32", max_model_len=256,
            scheduler={"max_running": 33, "max_step_tokens": 40, "prefill_chunk_tokens": 7},
        )
    )  # fmt: skip
    assert isinstance(engine.runner, TorchModelRunner)
    assert isinstance(engine.runner.forward, SequentialForward)
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, *requests[::-1]).token_ids == expected
    assert engine.stats().total_preemptions > 0
    assert engine.stats().total_cached_tokens > 0


def test_keys_and_values_in_8_bits_are_refused(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "bloom")
    with pytest.raises(InvalidSetup, match="the model computes attention with its own code"):
        build_sync_engine(config_of(path, cache={"dtype": "int8"}, max_model_len=256))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("openai-gpt", {}, "its code stores no keys and values in the cache object that it receives"),
        ("cpmant", {}, "a layer does not store one key and one value for each token in its cache object"),
    ],
)
def test_a_model_without_a_cache_of_its_tokens_is_refused(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = save_random_model(tmp_path, model_type, **settings)
    with pytest.raises(UnsupportedModel, match=f"the attention that it receives; with its own attention: {reason}"):
        load(path)
