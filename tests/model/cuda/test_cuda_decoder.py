"""The decoder for CUDA beside transformers' code: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.assembly import build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.engine import Engine
from tests.fakes import make_request, run_to_end

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
PROMPTS = (tuple(range(3, 18)), (5, 6, 7), tuple(range(3, 14)))


@pytest.fixture(autouse=True)
def _triton_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))


def build(path: Path, *, backend: str = "auto", num_blocks: int = 40, **scheduler: int) -> Engine:
    settings = {"max_running": 3, "max_step_tokens": 24, "prefill_chunk_tokens": 9} | scheduler
    return build_sync_engine(
        EngineConfig(
            model=ModelConfig(path=str(path), dtype="float32", backend=backend),
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**settings),
        )
    )


@pytest.fixture(autouse=True)
def _no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda":
        monkeypatch.setattr("app.model.backends.CudaCapture", lambda device: lambda function: function)


def forward_of(engine: Engine) -> object:
    return engine.runner._forward  # type: ignore[attr-defined]


def generate_plainly(path: Path, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    output = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0,
        max_new_tokens=max_tokens,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_generate_beside_others_in_pieces_and_after_preemption(
    architecture: str, tiny_model_path: Callable[[str], Path]
) -> None:
    path = tiny_model_path(architecture)
    engine = build(path, num_blocks=9)
    assert isinstance(forward_of(engine), CudaDecoder)
    requests = [make_request(prompt, max_tokens=7, ignore_eos=True) for prompt in PROMPTS]
    outcome = run_to_end(engine, *requests)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert outcome.token_ids[request.request_id] == generate_plainly(path, prompt, 7)
    assert engine.stats().total_preemptions > 0
