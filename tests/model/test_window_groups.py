"""Layers that look back a window give back the blocks behind it, and no token is another."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from app.build import build_sync_engine
from app.config import CacheConfig
from app.engine.engine import Engine
from app.engine.request import Request
from app.errors import InvalidSetup
from app.model.cpu.library import is_fast
from app.model.kv_cache import ONE_GROUP, LayerGroups, LayerShape, Place, block_bytes, num_blocks_that_fit
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.model.transformers_code import transformers_code
from tests.tiny_models import VOCAB_SIZE, build_tiny_model

SHAPE = LayerShape(num_kv_heads=2, key_dim=16, value_dim=16)
KINDS = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]


def groups_of(*windows: int | None, longest: int = 100, layers: dict[int, LayerShape] | None = None) -> LayerGroups:
    layers = layers or dict.fromkeys(range(len(windows)), SHAPE)
    return LayerGroups.of(layers, dict(enumerate(windows)), max_model_len=longest)


def test_layers_with_a_window_fill_blocks_of_as_many_places_as_there_are_layers_without() -> None:
    groups = groups_of(9, 9, None, 9, None)
    assert (groups.num_groups, groups.window) == (3, 9)
    assert [groups.place_of(layer)[:2] for layer in range(5)] == [(1, 0), (1, 1), (0, 0), (2, 0), (0, 1)]
    assert {groups.place_of(layer)[2:] for layer in range(5)} == {(0, 1)}, "a layer has its place alone"
    assert groups.in_block(dict.fromkeys(range(5), SHAPE)) == {0: SHAPE, 1: SHAPE}
    assert groups_of(*[9] * 5, None, 9).num_groups == 7  # as Gemma 3 has them
    assert ONE_GROUP.place_of(3) == Place(0, 3)


def large(number: int) -> dict[int, LayerShape]:
    """Every third layer, without a window, has so many times the keys and values of the others."""
    larger = LayerShape(num_kv_heads=2, key_dim=16 * number, value_dim=16 * number)
    return {layer: larger if layer % 3 == 2 else SHAPE for layer in range(9)}


WINDOWS_OF_TWO = (9, 9, None) * 3


def test_several_small_layers_with_a_window_share_a_place_of_a_large_one() -> None:
    layers = large(2)
    groups = groups_of(*WINDOWS_OF_TWO, layers=layers)
    assert groups.num_groups == 2
    assert [groups.place_of(layer) for layer in (2, 5, 8)] == [(0, 0, 0, 1), (0, 1, 0, 1), (0, 2, 0, 1)]
    in_window = [groups.place_of(layer) for layer in (0, 1, 3, 4, 6, 7)]
    assert in_window == [(1, 0, 0, 2), (1, 0, 1, 2), (1, 1, 0, 2), (1, 1, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]
    # As the layers with a window have it: in 8 bits each head has scales.
    assert groups.in_block(layers) == dict.fromkeys(range(3), SHAPE.times(2))


def test_several_small_layers_without_a_window_share_a_place_of_a_large_one_with_a_window() -> None:
    small = LayerShape(num_kv_heads=1, key_dim=16, value_dim=16)
    layers = {layer: small if layer % 3 == 2 else SHAPE for layer in range(9)}
    groups = groups_of(*WINDOWS_OF_TWO, layers=layers)
    assert [groups.place_of(layer) for layer in (2, 5, 8)] == [(0, 0, 0, 2), (0, 0, 1, 2), (0, 1, 0, 2)]
    assert [groups.place_of(layer)[:3] for layer in (0, 1, 3, 4, 6, 7)] == [
        (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (3, 0, 0), (3, 1, 0),
    ]  # fmt: skip
    assert groups.in_block(layers) == {0: SHAPE, 1: SHAPE}


def test_layers_that_read_what_others_stored_are_where_those_are() -> None:
    layers = {layer: shape for layer, shape in large(2).items() if layer < 6}
    groups = LayerGroups.of(
        layers, dict(enumerate(WINDOWS_OF_TWO)), max_model_len=100, stored_by={6: 4, 7: 4, 8: 5}
    )  # fmt: skip
    assert groups.num_groups == 2
    assert [groups.place_of(layer) for layer in (6, 7, 8)] == [groups.place_of(layer) for layer in (4, 4, 5)]
    one_that_looks_back = LayerGroups.of(
        layers, dict(enumerate(WINDOWS_OF_TWO)) | {6: None}, max_model_len=100, stored_by={6: 4, 7: 4, 8: 5}
    )  # fmt: skip
    assert one_that_looks_back.num_groups == 1, "a layer reads all that another one with a window stored"


def heads(number: int, dim: int) -> LayerShape:
    return LayerShape(num_kv_heads=number, key_dim=dim, value_dim=dim)


# Layers that store keys and values: those with a window, then those without; the window; what groups save.
GEMMA_4 = {
    "E2B": ((12, heads(1, 256)), (3, heads(1, 512)), 512, 0.66),
    "E4B": ((20, heads(2, 256)), (4, heads(2, 512)), 512, 0.70),
    "31B": ((50, heads(16, 256)), (10, heads(4, 512)), 1024, 0.88),
}


@pytest.mark.parametrize("name", GEMMA_4)
def test_what_gemma_4_saves_of_a_long_sequence(name: str) -> None:
    (num_in_window, of_window), (num_all_back, of_all_back), window, saved = GEMMA_4[name]
    shapes = [of_window] * num_in_window + [of_all_back] * num_all_back
    windows = [window] * num_in_window + [None] * num_all_back
    layers, cache, length = dict(enumerate(shapes)), CacheConfig(block_size=16), 32_768
    groups = LayerGroups.of(layers, dict(enumerate(windows)), max_model_len=length)
    num_blocks = length // 16 + (groups.num_groups - 1) * (window // 16 + 1)
    one, several = (block_bytes(cache, each, dtype=torch.bfloat16) for each in (layers, groups.in_block(layers)))
    assert 1 - num_blocks * several / (length // 16 * one) == pytest.approx(saved, abs=0.01)


@pytest.mark.parametrize(
    "groups",
    [
        groups_of(None, None), groups_of(9, 9), groups_of(9, None, None), groups_of(9, 8, None),
        groups_of(9, None, longest=9),
        groups_of(9, None, layers={0: SHAPE, 1: LayerShape(num_kv_heads=3, key_dim=16, value_dim=16)}),
        groups_of(*WINDOWS_OF_TWO, layers=large(5)),
        LayerGroups.of(large(2), dict(enumerate(WINDOWS_OF_TWO)), max_model_len=100, is_of_one_shape=True),
    ],
    ids=["none", "all", "few", "of two sizes", "as long as the context", "of shapes that do not fit",
         "of large layers without one", "of several shapes"],
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
    assert engine.model_info.num_window_groups == 2
    assert engine.model_info.max_model_len < num_blocks * block_size
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, *requests[::-1]).token_ids == expected
    assert (engine.stats().total_cached_tokens > 400) is not is_short, "a prefix is found with all of its windows"


@pytest.fixture(scope="module", params=["gemma4", "gemma4_large"])
def of_unequal_shapes(
    request: pytest.FixtureRequest, tiny_model_path: Callable[[str], Path], requests: list[Request]
) -> tuple[Path, dict[str, list[int]]]:
    """Layers with a window are the smaller ones, or the larger ones; and the tokens of `generate`."""
    path = tiny_model_path(request.param)
    return path, generate_plainly(path, requests)


@pytest.mark.parametrize("way", ["torch", "attention", "decoder"])
def test_tokens_of_layers_of_unequal_shapes_are_those_of_generate(
    way: str, of_unequal_shapes: tuple[Path, dict[str, list[int]]], requests: list[Request]
) -> None:
    if way != "torch" and not is_fast(torch.float32):
        pytest.skip("no C++ compiler here, or a CPU without wide vectors")
    path, expected = of_unequal_shapes
    block_size = 4 if way == "torch" else 16
    with transformers_code() if way == "attention" else nullcontext():
        engine = engine_of(
            path, block_size=block_size, num_blocks=480 // block_size, backend="torch" if way == "torch" else "auto"
        )
    assert engine.model_info.num_window_groups == (2 if path.name == "gemma4_large" else 1)
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, *requests[::-1]).token_ids == expected


def test_a_model_keeps_all_where_prefixes_are_kept_elsewhere_too(path: Path, tmp_path: Path) -> None:
    config = config_of(
        path, cache={"block_size": 4, "num_blocks": 100, "tiers": [{"path": str(tmp_path), "max_gib": 0.1}]},
        dtype="float32", backend="torch",
    )  # fmt: skip
    engine = build_sync_engine(config)
    assert (engine.model_info.num_window_groups, engine.model_info.max_model_len) == (0, 256)
    engine.close()


def test_fewer_blocks_than_groups_are_refused_with_the_numbers(path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"cache.num_blocks=2: .* blocks in 3 groups"):
        engine_of(path, block_size=4, num_blocks=2, backend="torch")
    cache = CacheConfig(block_size=16, memory_gib=0.00001)
    assert num_blocks_that_fit(cache, {0: SHAPE}, dtype=torch.float32) == 2
    with pytest.raises(InvalidSetup, match=r"one block of 16 tokens needs 0.000011 GiB"):
        num_blocks_that_fit(cache, {0: SHAPE}, dtype=torch.float32, num_groups=3)
