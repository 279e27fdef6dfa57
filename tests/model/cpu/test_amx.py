"""Tiles of the matrix unit in products, attention and whole steps: in plain C++ where the CPU has no AMX.

tests/model/test_attention.py has more of attention.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from app.model.cpu import library as native
from app.model.implementations.loaded_model import LoadedModel
from tests.kit.models import (
    BLOCKS,
    PROMPT,
    check_same_bits_in_any_step,
    chunk,
    decoder_of,
    load,
    logits_of,
    relative_error,
    step,
)
from tests.model.cpu.builds import IN_TILES, PLAIN_AMX, QUICK, built_with, program
from tests.tiny_models import build_tiny_model

SHAPE = {  # small: plain C++ computes whole tiles
    "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 32,
    "initializer_range": 0.2,
}  # fmt: skip
MODELS = {"llama": {}, "mistral": {"sliding_window": 21}, "mixtral": {"sliding_window": None}}

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C++ compiler")


def save_and_load(
    folder: Path, kind: str = "llama", *, dtype: str = "bfloat16", quantization: str = "none", **shape: int
) -> LoadedModel:
    build_tiny_model(kind, **SHAPE | MODELS[kind] | shape).save_pretrained(folder)
    return load(folder, dtype=dtype, quantization=quantization)


def test_products_have_the_units_order_of_sums_for_any_number_of_rows() -> None:
    """Under the address sanitiser: rows behind the last are neither read nor written."""
    compiler = native._compiler()
    assert compiler is not None, "it has built the library"
    products = program(compiler, "amx_products.cpp", "-g", "-march=native", "-fsanitize=address", PLAIN_AMX)
    done = subprocess.run([products], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "in_int8"), [("llama", True), ("mistral", False), ("mixtral", False)])
@torch.inference_mode()
def test_a_sequences_logits_do_not_depend_on_what_shares_its_steps(kind: str, in_int8: bool, tmp_path: Path) -> None:
    """Bit for bit: in one step alone, token by token, in chunks beside others, on other threads, with shared blocks."""
    model = save_and_load(tmp_path, kind)
    with built_with(*IN_TILES):
        crowded, whole = check_same_bits_in_any_step(model, in_int8=in_int8)

        sharing = [chunk(PROMPT, 69, 1, [*BLOCKS[:4], block]) for block in range(13, 20)]
        for item in sharing:
            step(crowded, chunk(PROMPT, 64, 5, item.block_ids))
        assert all(torch.equal(row, whole) for row in step(crowded, *sharing))


@pytest.mark.parametrize("kind", ["llama", "mistral"])  # in a mixture, rounding may choose another expert
@torch.inference_mode()
def test_logits_are_those_of_vector_instructions_but_for_rounding(kind: str, tmp_path: Path) -> None:
    model = save_and_load(tmp_path, kind, num_hidden_layers=3, head_dim=64, intermediate_size=160)  # rounding shows
    with built_with(*IN_TILES):
        in_tiles = decoder_of(model)
    by_vectors = decoder_of(model)
    num_equal = 0
    for start, size in ((0, 40), *((at, 1) for at in range(40, 70))):
        rows = [step(decoder, chunk(PROMPT, start, size, BLOCKS))[0] for decoder in (in_tiles, by_vectors)]
        num_equal += torch.equal(*rows)
        assert relative_error(*rows) < 0.03
    assert num_equal < 31, "tiles have another order of sums, which rounding does not always hide"


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@torch.inference_mode()
def test_quantised_weights_give_the_bits_of_vector_instructions(quantization: str, kind: str, tmp_path: Path) -> None:
    """Sums of whole numbers are exact, whatever their order."""
    model = save_and_load(tmp_path, kind, dtype="float32", quantization=quantization)
    with built_with(*IN_TILES):
        in_tiles = decoder_of(model)
    by_vectors = decoder_of(model)
    for start, size in ((0, 1), (1, 16), (17, 37), (54, 16)):
        rows = [step(decoder, chunk(PROMPT, start, size, BLOCKS)) for decoder in (in_tiles, by_vectors)]
        assert torch.equal(*rows)


@pytest.mark.parametrize("shape", [{"head_dim": 16}, {"hidden_size": 144}, {"intermediate_size": 48}])
@torch.inference_mode()
def test_sizes_that_do_not_fit_are_left_to_vector_instructions(
    shape: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with built_with(*IN_TILES):
        model = save_and_load(tmp_path, **shape)
        whole = logits_of(model)
        pieces = decoder_of(model)
        for start, size in ((0, 33), (33, 5), (38, 31), (69, 1)):
            rows = step(pieces, chunk(PROMPT, start, size, BLOCKS))
    assert torch.equal(rows[0], whole)
    assert f"not AMX: inputs of {next(iter(shape.values()))} are not multiples of 32" in caplog.text


@pytest.mark.skipif("amx_bf16" not in native._cpu(), reason="on a CPU without AMX the next test is refused in earnest")
@torch.inference_mode()
def test_without_the_kernels_permission_vector_instructions_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with built_with("-DCAROUSEL_PLAIN_AMX=95", *QUICK):
        refused = logits_of(save_and_load(tmp_path))
    assert "not AMX: the kernel refuses it (Operation not supported)" in caplog.text
    with built_with(*IN_TILES):
        assert not torch.equal(refused, logits_of(save_and_load(tmp_path)))


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="AMX is a part of x86-64")
@torch.inference_mode()
def test_a_build_for_amx_has_its_instructions_and_asks_for_permission(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with built_with("-mamx-tile", "-mamx-bf16", "-mamx-int8", *QUICK) as code:
        assert code.carousel_amx_refusal() != -1
        logits = logits_of(save_and_load(tmp_path))
    if objdump := shutil.which("objdump"):
        listing = subprocess.run([objdump, "-d", code._name], capture_output=True, text=True, check=True).stdout
        assert all(
            name in listing for name in ("tdpbf16ps", "tdpbsud", "tileloadd", "tilestored", "ldtilecfg", "tilerelease")
        )
    if "amx_bf16" not in native._cpu():
        assert "not AMX: the kernel refuses it" in caplog.text
        assert torch.equal(logits, logits_of(save_and_load(tmp_path)))
