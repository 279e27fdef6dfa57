"""Layers that look back a window give back blocks on a GPU too: the kernels read a table of blocks for each group."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.build import build_sync_engine
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.model.cuda.test_graph_runner import RunAgain
from tests.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonAttention

WINDOW, TILE = 9, 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding")]
    build_tiny_model("gemma2", num_hidden_layers=3, layer_types=kinds).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("backend", ["triton", "auto"], ids=["eager", "replayed"])
def test_tokens_are_those_of_generate(backend: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda _: True))
    monkeypatch.setattr("app.model.implementations.gpu.CudaCapture", lambda _: RunAgain())
    for module in ("implementations.transformers_code", "cuda.attention"):
        monkeypatch.setattr(f"app.model.{module}.LARGEST_TILE", TILE)
    config = config_of(
        path, cache={"block_size": 4, "num_blocks": 34}, dtype="float32", backend=backend,
        scheduler={"max_running": 2, "max_step_tokens": 12, "prefill_chunk_tokens": 10},
    )  # fmt: skip
    engine = build_sync_engine(config)
    model_info = engine.model_info
    # Kernels read from the tile on in which a window begins. Each of three groups has 11 blocks.
    assert (model_info.num_window_groups, model_info.window_tokens, model_info.max_model_len) == (
        2,
        WINDOW + TILE - 1,
        11 * 4,
    )
    long = tuple((7 * at * at + 3) % 200 + 3 for at in range(36))
    requests = [make_request(prompt, max_tokens=4, ignore_eos=True) for prompt in (long, (5, 6, 7), (*long[:33], 8))]
    expected = generate_plainly(path, requests)
    found = run_to_end(engine, *requests[:2]).token_ids | run_to_end(engine, requests[2]).token_ids
    assert found == expected
    assert engine.stats().total_cached_tokens == 32
