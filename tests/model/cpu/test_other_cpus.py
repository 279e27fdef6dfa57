"""The native code as it is built for CPUs without AVX-512: run here with AVX2, compiled for Arm."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.model.cpu import library as native
from tests.kit.models import DTYPES, PROMPT, check_same_bits_in_any_step, chunk, decoder_of, load, own_model, step
from tests.model.cpu.builds import QUICK, built_with, program

AVX2 = ("-march=x86-64-v3",)
BLOCKS = [3, 8, 1, 0, 9, 13, 14]


@pytest.fixture
def avx2() -> Iterator[None]:
    if platform.machine() != "x86_64" or not {"avx2", "fma"} <= set(native._cpu().split()):
        pytest.skip("this CPU has no AVX2")
    with built_with(*AVX2, *QUICK):
        yield


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
@torch.inference_mode()
def test_with_avx2_greedy_tokens_are_transformers_own(architecture: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path(architecture)
    own, decoder, tokens = own_model(path), decoder_of(load(path)), list(PROMPT)
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
    model = load(tiny_model_path("llama"), dtype=dtype)
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


PLAIN, V4 = "-DCAROUSEL_PLAIN_INT8", "-march=x86-64-v4"  # AVX-512 without VNNI
BYTES, HALVES, SHORTS, ANY = 0, 1, 2, 3  # as in `Dot`


# Flags of a build, the flags of a CPU that can run it, and its `Dot`; None: any.
BUILDS = pytest.mark.parametrize(
    ("flags", "needed", "way"),
    [
        (("-march=native",), set(), None),
        (("-march=native", PLAIN), set(), ANY),
        (AVX2, {"avx2", "fma"}, SHORTS),
        ((V4,), {"avx512bw", "avx512vl"}, SHORTS),
        (("-march=x86-64-v3", "-mavxvnni"), {"avx_vnni"}, BYTES),
    ],
    ids=["native", "plain", "avx2", "avx512", "avx-vnni"],
)


@BUILDS
def test_sums_of_products_of_bytes_are_exact(flags: tuple[str, ...], needed: set[str], way: int | None) -> None:
    done = run_build("byte_products.cpp", flags, needed)
    assert done.returncode in (range(4) if way is None else (way,)), done.stdout


@BUILDS
def test_products_with_the_blocks_of_a_file_are_those_of_their_numbers(
    flags: tuple[str, ...], needed: set[str], way: int | None
) -> None:
    done = run_build("stored_products.cpp", flags, needed)
    assert done.returncode == 0, done.stdout


def run_build(source: str, flags: tuple[str, ...], needed: set[str]) -> subprocess.CompletedProcess[str]:
    """What a program returns that is built with such flags; skips the test where that cannot run."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86")
    built = program(compiler, source, *flags)
    if not needed <= set(native._cpu().split()):
        pytest.skip(f"compiled, but this CPU has no {', '.join(needed)}")
    return subprocess.run([built], capture_output=True, text=True)


@pytest.mark.parametrize(("march", "way"), [("armv8-a", ANY), ("armv8.2-a+dotprod", HALVES), ("armv8.6-a+i8mm", BYTES)])
def test_sums_of_products_of_bytes_are_exact_on_arm(march: str, way: int) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("there is no aarch64-linux-gnu-g++ or no qemu-aarch64")
    products = program(compiler, "byte_products.cpp", f"-march={march}", "-static")
    done = subprocess.run([emulator, "-cpu", "max", products], capture_output=True, text=True)
    assert done.returncode == way, done.stdout


def test_it_compiles_for_arm(tmp_path: Path) -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("there is no aarch64-linux-gnu-g++")
    flags = [flag for flag in native._FLAGS if not flag.startswith(("-m", "-O"))]  # optimised it takes a minute
    assert native._build(compiler, [*flags, "-O0"], tmp_path / "native.so").stat().st_size > 0
