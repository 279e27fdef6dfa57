from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.engine.engine import Engine
from app.errors import UnsupportedModel
from app.model.implementations.transformers_code import TransformersModel
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly, load
from tests.tiny_models import build_tiny_model

TRAINED = 64
LONG_FACTORS = [1.0 + 3 * n for n in range(8)]
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 8, "long_factor": LONG_FACTORS,
        "original_max_position_embeddings": TRAINED,
    },
}  # fmt: skip


def save(folder: Path, kind: str) -> Path:
    limit = TRAINED if kind == "dynamic" else 256
    model = build_tiny_model("llama", rope_parameters=KINDS[kind], max_position_embeddings=limit)
    model.save_pretrained(folder)
    return folder


def build(path: Path, max_model_len: int | None = None) -> Engine:
    scheduler = {"max_running": 8, "max_step_tokens": 400}
    cache = {"block_size": 4, "num_blocks": 200}
    return build_sync_engine(
        config_of(path, cache=cache, scheduler=scheduler, backend="torch", max_model_len=max_model_len)
    )


SHORT = make_request((5, 6, 7, 8, 9), max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("kind", KINDS)
def test_within_the_length_it_was_trained_with_a_model_computes_what_transformers_does(
    tmp_path: Path, kind: str
) -> None:
    path = save(tmp_path, kind)
    longest = make_request(tuple(3 + n % 200 for n in range(50)), max_tokens=14, ignore_eos=True)
    outcome = run_to_end(build(path, max_model_len=TRAINED), SHORT, longest)
    assert outcome.token_ids == generate_plainly(path, (SHORT, longest))


def test_a_request_has_the_same_positions_beside_a_long_one_as_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, "longrope")
    long = make_request(tuple(3 + n % 200 for n in range(150)), max_tokens=16, ignore_eos=True)
    with caplog.at_level("INFO"):
        engine = build(path)
    assert "all sequences use the longrope positions for 256 tokens" in caplog.text
    beside = run_to_end(engine, SHORT, long).token_ids
    alone = {}
    for request in (SHORT, long):
        engine.clear_prefix_cache()
        alone |= run_to_end(engine, request).token_ids
    assert beside == alone
    assert beside[long.request_id] == generate_plainly(path, (long,))[long.request_id]


def test_a_model_whose_positions_follow_the_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, "longrope")
    monkeypatch.setattr("app.model.source.fix_positions", lambda module, max_model_len: None)
    with pytest.raises(UnsupportedModel, match="alongside a long sequence"):
        load(path, backend="torch")
    assert load(path, backend="torch", max_model_len=TRAINED).dtype is torch.float32


def test_no_forward_pass_depends_on_a_value_of_the_device_afterwards(tmp_path: Path) -> None:
    """On the meta device no value can be read."""
    model = load(save(tmp_path, "dynamic"), backend="torch")
    assert isinstance(model, TransformersModel)
    module = model.module
    rotary = module.model.rotary_emb.to("meta")
    rotary(torch.empty(1, device="meta"), torch.empty(1, 5, dtype=torch.long, device="meta"))
