"""The native code as it is built for CPUs without AVX-512: run here with AVX2, compiled for Arm."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.config import ModelConfig
from app.model.cpu import library as native
from app.model.loader import load_model
from tests.model.cpu.builds import built_with
from tests.model.cpu.test_decoder import DTYPES, PROMPT, check_same_bits_in_any_step, chunk, decoder_of, step

AVX2 = ("-march=x86-64-v3",)
BLOCKS = [3, 8, 1, 0, 9, 13, 14]


@pytest.fixture
def avx2() -> Iterator[None]:
    if platform.machine() != "x86_64" or not {"avx2", "fma"} <= set(native._cpu().split()):
        pytest.skip("this CPU has no AVX2")
    with built_with(*AVX2):
        yield


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
@torch.inference_mode()
def test_with_avx2_greedy_tokens_are_transformers_own(architecture: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path(architecture)
    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model = load_model(ModelConfig(path=str(path), device="cpu", dtype="float32"), str(path))
    decoder, tokens = decoder_of(model), list(PROMPT)
    logits = step(decoder, chunk(tokens, 0, len(tokens), BLOCKS))[0]
    for _ in range(32):
        expected = own(torch.tensor([tokens])).logits[0, -1]
        assert torch.allclose(logits, expected, atol=1e-4)
        assert int(logits.argmax()) == int(expected.argmax())
        tokens.append(int(logits.argmax()))
        logits = step(decoder, chunk(tokens, len(tokens) - 1, 1, BLOCKS))[0]


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_with_avx2_a_sequences_bits_do_not_depend_on_what_shares_its_steps(dtype: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path("llama")
    model = load_model(ModelConfig(path=str(path), device="cpu", dtype=dtype), str(path))  # type: ignore[arg-type]
    for in_int8 in (False, True):
        check_same_bits_in_any_step(model, in_int8=in_int8)


@pytest.mark.usefixtures("avx2")
def test_with_avx2_it_is_used_in_both_types() -> None:
    assert native.is_fast(torch.float32)
    assert native.is_fast(torch.bfloat16)


@pytest.mark.parametrize(
    ("flags", "fast"), [(("-march=x86-64",), ()), (("-march=x86-64-v3",), ("f32", "bf16"))], ids=["sse", "avx2"]
)
def test_a_build_says_in_which_types_it_is_fast(flags: tuple[str, ...], fast: tuple[str, ...]) -> None:
    """By the preprocessor: a whole build without vectors takes a minute."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86")
    source = native._SOURCES / "library.cpp"
    text = subprocess.run(
        [compiler, *flags, "-std=c++17", "-E", "-P", str(source)], check=True, capture_output=True, text=True
    ).stdout
    for suffix in native.DTYPES.values():
        body = text.split(f"int32_t carousel_is_fast_in_{suffix}() {{")[1].split("}")[0]
        assert body.split() == ["return", "1;" if suffix in fast else "0;"]


def test_it_compiles_for_arm(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no aarch64-linux-gnu-g++")
    target = tmp_path / "native.so"
    flags = [flag for flag in native._FLAGS if not flag.startswith(("-m", "-O"))]  # optimised it takes a minute
    subprocess.run(
        [compiler, *flags, "-O0", "-o", str(target), str(native._SOURCES / "library.cpp")],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert target.stat().st_size > 0
