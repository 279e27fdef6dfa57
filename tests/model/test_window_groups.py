"""Layers that look back a window give back the blocks behind it, and no token is another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from app.build import build_sync_engine
from app.config import CacheConfig
from app.engine.engine import Engine
from app.engine.request import Request
from app.errors import InvalidSetup
from app.model.cpu.library import is_fast
from app.model.kv_cache import ONE_GROUP, LayerGroups, LayerShape, num_blocks_that_fit
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.tiny_models import VOCAB_SIZE, build_tiny_model

SHAPE = LayerShape(num_kv_heads=2, key_dim=16, value_dim=16)
KINDS = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]


def groups_of(*windows: int | None, longest: int = 100, layers: dict[int, LayerShape] | None = None) -> LayerGroups:
    layers = layers or dict.fromkeys(range(len(windows)), SHAPE)
    return LayerGroups.of(layers, dict(enumerate(windows)), max_model_len=longest)


def test_layers_with_a_window_fill_blocks_of_as_many_places_as_there_are_layers_without() -> None:
    groups = groups_of(9, 9, None, 9, None)
    assert (groups.num_groups, groups.window) == (3, 9)
    assert [groups.place_of(layer) for layer in range(5)] == [(1, 0), (1, 1), (0, 0), (2, 0), (0, 1)]
    assert groups.in_block(dict.fromkeys(range(5), SHAPE)) == {0: SHAPE, 1: SHAPE}
    assert groups_of(*[9] * 5, None, 9).num_groups == 7  # as Gemma 3 has them
    assert ONE_GROUP.place_of(3) == (0, 3)


@pytest.mark.parametrize(
    "groups",
    [
        groups_of(None, None), groups_of(9, 9), groups_of(9, None, None), groups_of(9, 8, None),
        groups_of(9, None, longest=9),
        groups_of(9, None, layers={0: SHAPE, 1: LayerShape(num_kv_heads=1, key_dim=16, value_dim=16)}),
    ],
    ids=["none", "all", "few", "of two sizes", "as long as the context", "of two shapes"],
)  # fmt: skip
def test_where_it_would_save_nothing_or_is_not_known_all_layers_are_one_group(groups: LayerGroups) -> None:
    assert groups == ONE_GROUP


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    build_tiny_model("gemma2", num_hidden_layers=5, layer_types=KINDS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Longer than a window and what kernels read before it; some have beginnings in common."""
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(150)]
    lengths = [150, 131, 97, 40, 5, 110]
    prompts = [
        (
            *shared[: length * (number % 2)],
            *(rng.randrange(3, VOCAB_SIZE) for _ in range(length * (1 - number % 2) + 3)),
        )
        for number, length in enumerate(lengths)
    ]
    return [make_request(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]


@pytest.fixture(scope="module")
def expected(path: Path, requests: list[Request]) -> dict[str, list[int]]:
    return generate_plainly(path, requests)


def engine_of(path: Path, *, block_size: int, num_blocks: int, backend: str) -> Engine:
    config = config_of(
        path, cache={"block_size": block_size, "num_blocks": num_blocks}, dtype="float32", backend=backend,
        scheduler={"max_running": 4, "max_step_tokens": 64, "prefill_chunk_tokens": 32},
    )  # fmt: skip
    return build_sync_engine(config)


@pytest.mark.parametrize(("way", "block_size"), [("torch", 4), ("attention", 16)])
@pytest.mark.parametrize("is_short", [False, True], ids=["room for all", "too little room"])
def test_tokens_are_those_of_generate(
    way: str, block_size: int, is_short: bool, path: Path, requests: list[Request], expected: dict[str, list[int]]
) -> None:
    if way == "attention" and not is_fast(torch.float32):
        pytest.skip("no C++ compiler here, or a CPU without wide vectors")
    num_blocks = (480 if is_short else 2400) // block_size
    engine = engine_of(
        path, block_size=block_size, num_blocks=num_blocks, backend="torch" if way == "torch" else "auto"
    )
    assert engine.facts.num_window_groups == 2
    assert engine.facts.max_model_len < num_blocks * block_size
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, *requests[::-1]).token_ids == expected
    assert (engine.stats().total_cached_tokens > 400) is not is_short, "a prefix is found with all of its windows"


def test_a_model_keeps_all_where_prefixes_are_kept_elsewhere_too(path: Path, tmp_path: Path) -> None:
    config = config_of(
        path, cache={"block_size": 4, "num_blocks": 100, "tiers": [{"path": str(tmp_path), "max_gib": 0.1}]},
        dtype="float32", backend="torch",
    )  # fmt: skip
    engine = build_sync_engine(config)
    assert (engine.facts.num_window_groups, engine.facts.max_model_len) == (0, 256)
    engine.close()


def test_fewer_blocks_than_groups_are_refused_with_the_numbers(path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"cache.num_blocks=2: .* blocks in 3 groups"):
        engine_of(path, block_size=4, num_blocks=2, backend="torch")
    cache = CacheConfig(block_size=16, memory_gib=0.00001)
    assert num_blocks_that_fit(cache, {0: SHAPE}, dtype=torch.float32) == 2
    with pytest.raises(InvalidSetup, match=r"one block of 16 tokens needs 0.000011 GiB"):
        num_blocks_that_fit(cache, {0: SHAPE}, dtype=torch.float32, num_groups=3)
