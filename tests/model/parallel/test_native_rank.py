"""The C++ decoder in several processes, each with its part of the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from app.errors import InvalidSetup, UnsupportedModel
from app.model.loader import LoadedModel, load_model, load_native_rank
from app.model.parallel.group import RankGroup
from tests.model.parallel.native_rank import config_of, group_of, logits_of_steps
from tests.tiny_models import build_tiny_model

PROMPT = [(11 * at + 5) % 200 + 3 for at in range(40)]
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@contextmanager
def others(
    size: int,
    folder: Path,
    path: Path,
    dtype: str,
    quantization: str = "none",
    *,
    expected: str = "computed\n",
    **more: object,
) -> Iterator[RankGroup]:
    """This process's place in a group; meanwhile the other ranks load the model and compute the same steps.

    expected: what each of them says at its end.
    """
    store = folder / "store"
    asked = {"size": size, "store": str(store), "path": str(path), "dtype": dtype, "quantization": quantization, **more}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.model.parallel.native_rank", json.dumps({**asked, "rank": rank})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(1, size)
    ]  # fmt: skip
    try:
        yield group_of(0, size, str(store))
        for process in processes:
            said, error = process.communicate(timeout=60)
            assert process.returncode == 0, error
            assert said == expected
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def greedy(model: LoadedModel, num_tokens: int) -> list[int]:
    token_ids = list(PROMPT)
    for _ in range(num_tokens):
        token_ids.append(int(logits_of_steps(model, token_ids, len(PROMPT))[-1].argmax()))
    return token_ids


@pytest.mark.parametrize(
    ("architecture", "size", "dtype"),
    [
        ("qwen2", 2, "float32"), ("qwen3", 4, "float32"), ("mistral", 2, "float32"), ("mixtral", 2, "float32"),
        ("qwen3_moe", 2, "float32"), ("llama", 2, "bfloat16"),
    ],
)  # fmt: skip
def test_ranks_in_processes_have_the_tokens_of_one_process(
    architecture: str, size: int, dtype: str, tmp_path: Path
) -> None:
    changes = {"moe_intermediate_size": 64} if architecture == "qwen3_moe" else {}
    path = tmp_path / "model"
    build_tiny_model(architecture, **changes).save_pretrained(path)
    config, checks = config_of(str(path), dtype, "none"), tmp_path / "checks"
    whole = load_model(config, str(path), block_size=16, checks=checks)
    token_ids = greedy(whole, 12)
    expected = logits_of_steps(whole, token_ids, len(PROMPT))
    with others(size, tmp_path, path, dtype, token_ids=token_ids, num_prompt=len(PROMPT)) as group:
        model = load_native_rank(config, str(path), group, block_size=16, checks=checks)
        assert model is not None
        got = logits_of_steps(model, token_ids, len(PROMPT))
    limit = 2e-5 if dtype == "float32" else 0.06 * float(expected[0].abs().max())
    for mine, theirs in zip(got, expected, strict=True):
        assert float((mine - theirs).abs().max()) < limit
        assert int(mine.argmax()) == int(theirs.argmax())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_ranks_of_quantised_weights_read_their_part_alone(quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    build_tiny_model("llama", **WIDE, tie_word_embeddings=True).save_pretrained(path)
    config = config_of(str(path), "float32", quantization)
    whole = load_model(config, str(path), block_size=16)
    token_ids = greedy(whole, 3)
    expected = logits_of_steps(whole, token_ids, len(PROMPT))
    asked = {"token_ids": token_ids, "num_prompt": len(PROMPT)}
    with others(2, tmp_path, path, "float32", quantization, **asked) as group:
        model = load_native_rank(config, str(path), group, block_size=16, checks=None)
        assert model is not None
        got = logits_of_steps(model, token_ids, len(PROMPT))
    # The last bit of a sum decides to which of two numbers of 8 bits an input is rounded.
    for mine, theirs in zip(got, expected, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.03
    assert model.native is not None
    assert whole.native is not None
    for mine, theirs in zip(model.native.layers, whole.native.layers, strict=True):
        assert 2 * mine.output.numel() == theirs.output.numel()
        assert 2 * mine.mlps[0].down.numel() == theirs.mlps[0].down.numel()
        assert 2 * mine.query_key_value.numel() == theirs.query_key_value.numel()
    assert {shape.num_kv_heads for shape in model.layers.values()} == {2}


def test_a_kept_check_spares_the_ranks_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, checks = tmp_path / "model", tmp_path / "checks"
    build_tiny_model("llama").save_pretrained(path)
    config = config_of(str(path), "float32", "none")
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        with others(2, folder, path, "float32", token_ids=PROMPT, num_prompt=len(PROMPT)) as group:
            model = load_native_rank(config, str(path), group, block_size=16, checks=checks)
            assert model is not None
            logits_of_steps(model, PROMPT, len(PROMPT))
        monkeypatch.setattr("app.model.loader.load_model", None)


def test_a_model_that_is_not_native_is_none_on_all_ranks(
    tmp_path: Path, tiny_model_path: Callable[[str], Path]
) -> None:
    path = tiny_model_path("gemma2")
    with others(2, tmp_path, path, "float32", expected="not native\n") as group:
        config = config_of(str(path), "float32", "none")
        assert load_native_rank(config, str(path), group, block_size=16, checks=None) is None


def test_all_ranks_go_without_native_code_where_one_has_none(
    tmp_path: Path, tiny_model_path: Callable[[str], Path]
) -> None:
    path = tiny_model_path("llama")
    with others(2, tmp_path, path, "float32", expected="not native\n", has_library=False) as group:
        config = config_of(str(path), "float32", "none")
        assert load_native_rank(config, str(path), group, block_size=16, checks=None) is None


def test_all_ranks_refuse_a_model_of_which_they_compute_something_else(
    tmp_path: Path, tiny_model_path: Callable[[str], Path]
) -> None:
    path = tiny_model_path("llama")
    refused = "computes other results on 2 ranks than on one: the first layer's output differs"
    with others(2, tmp_path, path, "float32", expected="refused\n", is_wrong=True) as group:
        config = config_of(str(path), "float32", "none")
        with pytest.raises(UnsupportedModel, match=refused):
            load_native_rank(config, str(path), group, block_size=16, checks=None)


class Alone(RankGroup):
    """A group without exchanges: what all ranks decide in the same way."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def send_all(self, content: bytes = b"") -> bytes:
        return content

    def minimum(self, number: int) -> int:
        return number


def test_quantised_groups_that_ranks_would_divide_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    build_tiny_model("llama").save_pretrained(path)
    with pytest.raises(InvalidSetup, match="the 64 inputs of its attention's output are no multiple of 2 x 64"):
        load_native_rank(config_of(str(path), "float32", "int8"), str(path), Alone(2), block_size=16, checks=None)
    assert (
        load_native_rank(config_of(str(path), "float32", "none"), str(path), Alone(3), block_size=16, checks=None)
        is None
    )


def test_ranks_send_bytes(tmp_path: Path) -> None:
    group = RankGroup(0, 1, store=tmp_path / "store", device=torch.device("cpu"), timeout_s=10)
    assert group.send_all(b"\x00\xff ok") == b"\x00\xff ok"
    assert group.send_all() == b""
