"""torch's FlashAttention over gathered keys and values; on a CPU with a stand-in for its one function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.engine.batch import StepBatch
from app.errors import InvalidSetup
from app.model.attention import AttentionRules, TorchAttention
from app.model.cuda import library_attention
from app.model.cuda.library_attention import LibraryAttention
from app.model.gpu_backends import LIBRARY
from app.model.inputs import build_inputs
from app.model.kv_cache import KVCache, LayerShape
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, config_of, generate_plainly, relative_error, scheduled
from tests.tiny_models import ALL

OWN_VARLEN = library_attention.varlen_attn  # before a fixture replaces it
pytestmark = pytest.mark.usefixtures("triton_here", "library_here")
PROMPTS = [tuple(range(5, 5 + length)) for length in (1, 9, 30, 23)]
OTHERS = {"gemma2"}  # its layers have a softcap


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tokens in 16 bits are compared by no test; numbers are, below")
@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("at_once", [None, 1])
def test_steps_have_the_tokens_of_generate(
    architecture: str,
    at_once: int | None,
    tiny_model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """at_once: bytes of keys and values; 1: the sequences of a step one after another."""
    if at_once is not None:
        monkeypatch.setattr("app.model.cuda.library_attention.BYTES_AT_ONCE", at_once)
    path = tiny_model_path(architecture)
    config = config_of(
        path, backend=LIBRARY, dtype="float32", cache={"block_size": 4, "num_blocks": 96},
        scheduler={"max_running": 3, "max_step_tokens": 16, "prefill_chunk_tokens": 7},
    )  # fmt: skip
    if architecture in OTHERS:
        with pytest.raises(
            InvalidSetup, match=r"library, but it cannot run \S+ here: library: .* does not support softcap"
        ):
            build_sync_engine(config)
        return
    engine = build_sync_engine(config)
    engine.prepare()
    requests = [make_request(prompt, max_tokens=5, ignore_eos=True) for prompt in PROMPTS]
    assert run_to_end(engine, *requests).token_ids == generate_plainly(path, requests)


def test_torch_is_told_that_heads_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments that torch's function has in this version."""
    told: list[dict[str, Any]] = []

    def older(query: torch.Tensor, *, scale: float) -> torch.Tensor:
        told.append({"scale": scale})
        return query

    def newer(query: torch.Tensor, *, scale: float, enable_gqa: bool = False) -> torch.Tensor:
        told.append({"scale": scale, "enable_gqa": enable_gqa})
        return query

    for function in (older, newer):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        OWN_VARLEN(torch.zeros(1), scale=0.5)
    assert told == [{"scale": 0.5}, {"scale": 0.5, "enable_gqa": True}]


def shape_of(key_dim: int, value_dim: int) -> LayerShape:
    return LayerShape(num_kv_heads=2, key_dim=key_dim, value_dim=value_dim)


USUAL = shape_of(64, 64)


def test_what_it_does_not_compute_is_told() -> None:
    def why_not(shape: LayerShape = USUAL, dtype: torch.dtype = torch.bfloat16, **given: object) -> str | None:
        own = AttentionRules(scaling=1.0, **given)  # type: ignore[arg-type]
        return LibraryAttention.why_not(
            {0: shape_of(64, 64), 7: shape}, {0: AttentionRules(scaling=1.0), 7: own}, dtype
        )

    assert why_not() is None
    assert why_not(sliding_window=5) is None
    assert why_not(shape_of(256, 256)) is None
    for refused, words in (
        (why_not(dtype=torch.float64), "a 16-bit type"),
        (why_not(shape_of(192, 128)), "keys of 192 and values of 128 numbers, as in layer 7"),
        (why_not(shape_of(512, 512)), "of 512 numbers"),
        (why_not(shape_of(20, 20)), "of 20 numbers"),
        (why_not(softcap=30.0), "not support softcap, which layer 7"),
        (why_not(sinks=torch.zeros(4)), "not support attention sinks, which layer 7"),
        (why_not(is_latent=True), "not support latents, which layer 7"),
    ):
        assert refused is not None
        assert words in refused


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("at_once", [1, 3_000, 10**9])
def test_a_step_attends_as_plain_torch_does(window: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a prompt, a later piece of one, and single tokens. On a GPU this runs torch's own kernels."""
    monkeypatch.setattr("app.model.cuda.library_attention.BYTES_AT_ONCE", at_once)
    block_size, numbers = 4, torch.Generator().manual_seed(0)
    items = [
        scheduled(tuple(range(7)), 0, [0, 1]),
        scheduled(tuple(range(5)), 18, list(range(2, 8))),
        scheduled([3], 21, list(range(8, 14))),
        scheduled([4], 0, [14]),
    ]
    batch = StepBatch(tuple(items), ())
    inputs = build_inputs(batch, block_size=block_size, device=DEVICE)
    num_tokens = inputs.token_ids.shape[1]

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=numbers).to(DEVICE, torch.bfloat16)

    query, key, value = random(num_tokens, 4, 64), random(num_tokens, 2, 64), random(num_tokens, 2, 64)
    cached = random(15, block_size, 2, 64), random(15, block_size, 2, 64)
    found = []
    for kind in (TorchAttention, LibraryAttention):
        cache = KVCache(
            {0: shape_of(64, 64)}, num_blocks=15, block_size=block_size, dtype=torch.bfloat16, device=DEVICE
        )
        for memory, content in zip(cache.layer(0), cached, strict=True):
            memory.copy_(content)
        step = kind(cache, DEVICE).begin_step(batch, inputs)
        found.append(step.attend(0, query, key, value, AttentionRules(scaling=0.125, sliding_window=window)))
    assert relative_error(found[1], found[0]) < 0.01
