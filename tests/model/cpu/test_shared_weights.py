from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from app import disk
from app.model.cpu import shared_weights
from app.model.cpu.library import is_fast
from app.model.cpu.shared_weights import LARGE_PAGE, _find, _GrowingFile
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.native_decoder import NativeModel
from tests.kit.models import load, logits_of

pytestmark = pytest.mark.skipif(not is_fast(torch.float32), reason="this CPU cannot compute the native decoder")

# Loads a model that has passed its checks, says that it has, and holds it until it is killed.
_HOLDER = """
import sys
from pathlib import Path
from app.config import ModelConfig
from app import disk
from app.model.cpu import shared_weights
from app.model.loader import load_model
path, cache, state = sys.argv[1:]
def wait(*_given):
    print(state, flush=True)
    sys.stdin.readline()
if state == "packs":
    shared_weights._GrowingFile.finish = wait
model = load_model(ModelConfig(path=path, device="cpu", dtype="float32"), path, checks=Path(cache))
wait()
"""


@contextmanager
def other_process(path: Path, cache: Path, state: str) -> Iterator[subprocess.Popen[str]]:
    """state: holds or packs."""
    load(path, checks=cache)  # with the check that spares the process transformers
    command = [sys.executable, "-c", _HOLDER, str(path), str(cache), state]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{state}\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def never_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(*_given: object) -> int:
        raise AssertionError("another process has packed the weights")

    monkeypatch.setattr(shared_weights, "_packed", packed)


def inode_of(model: LoadedModel) -> int:
    """Of the file that has its weights, as the kernel shows it."""
    assert isinstance(model, NativeModel)
    first = min(tensor.data_ptr() for tensor in model.weights.tensors())
    lines = Path("/proc/self/maps").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{first:08x}-")).split()[4])


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_shared_weights_give_the_bits_of_private_ones(
    architecture: str, quantization: str, tiny_model_path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path(architecture)
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", _refused)
        private = load(path, checks=tmp_path, quantization=quantization)
    first = load(path, checks=tmp_path, quantization=quantization)
    never_packed(monkeypatch)
    second = load(path, checks=tmp_path, quantization=quantization)
    assert inode_of(first) == inode_of(second)
    assert torch.equal(logits_of(first), logits_of(private))
    assert torch.equal(logits_of(second), logits_of(private))


def _refused(*_given: object) -> None:
    raise OSError("no such memory")


def test_another_process_shares_them_and_they_outlive_it(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits_of(load(model_path, checks=tmp_path))
    with other_process(model_path, tmp_path, "holds"):
        never_packed(monkeypatch)
        model = load(model_path, checks=tmp_path)
        assert torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(load(model_path, checks=tmp_path)), expected)


def test_a_process_waits_for_one_that_packs_and_takes_over_where_that_is_killed(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(load(model_path, checks=tmp_path))
    with other_process(model_path, tmp_path, "packs") as process:
        assert _find(next(tmp_path.glob("carousel-weights-*.lock")).stem) is None
        take_lock = disk.take_lock

        def kill_it_and_wait(path: Path, *, waits: bool = False) -> int | None:
            if waits:
                process.kill()
            return take_lock(path, waits=waits)

        monkeypatch.setattr(disk, "take_lock", kill_it_and_wait)
        with caplog.at_level("INFO"):
            model = load(model_path, checks=tmp_path)
    assert "waiting for another process to pack them" in caplog.text
    assert torch.equal(logits_of(model), expected)


def test_other_files_of_the_model_have_other_weights(model_path: Path, tmp_path: Path) -> None:
    first = load(model_path, checks=tmp_path)
    changed = model_path / "model.safetensors"
    changed.write_bytes(changed.read_bytes()[:-8] + b"\0" * 8)
    os.utime(changed, ns=(1, 1))
    assert inode_of(load(model_path, checks=tmp_path)) != inode_of(first)


def test_a_cache_that_cannot_be_written_is_said_in_the_log(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits_of(load(model_path, checks=tmp_path))
    file = tmp_path / "file"
    file.touch()
    assert torch.equal(logits_of(load(model_path, checks=file)), expected)
    assert "replicas that start at the same time do not share their weights" in caplog.text
    assert f"{file}/carousel-weights-" in caplog.text


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_weights_that_are_let_go_of_come_back_with_the_same_bits(
    quantization: str, model_path: Path, tmp_path: Path
) -> None:
    model = load(model_path, checks=tmp_path, quantization=quantization)
    expected = logits_of(model)
    name = next(tmp_path.glob("carousel-weights-*.lock")).stem
    found = _find(name)
    assert found is not None
    os.close(found)
    del model
    gc.collect()
    assert _find(name) is None
    assert torch.equal(logits_of(load(model_path, checks=tmp_path, quantization=quantization)), expected)


def test_a_whole_file_cannot_be_written_and_is_the_owners_alone() -> None:
    with _GrowingFile("carousel-weights-test") as file:
        file.allocate(LARGE_PAGE + 1, dtype=torch.uint8).fill_(7)
        descriptor = file.finish(b"layout")
    try:
        assert shared_weights._layout_in(descriptor) == (2 * LARGE_PAGE, b"layout")
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
        writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"x", 0)
        os.close(writable)
    finally:
        os.close(descriptor)


def test_files_of_other_users_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    with _GrowingFile("carousel-weights-owned") as file:
        file.allocate(64, dtype=torch.uint8)
        descriptor = file.finish(b"")
    found = _find("carousel-weights-owned")
    assert found is not None
    os.close(found)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert _find("carousel-weights-owned") is None
    os.close(descriptor)


def test_matrices_of_all_sizes_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the memory grows between them."""
    monkeypatch.setattr(shared_weights, "_GROWTH", LARGE_PAGE)
    sizes = (1, 64, LARGE_PAGE - 64, 3 * LARGE_PAGE + 5, 7)
    with _GrowingFile("carousel-weights-sizes") as file:
        tensors = [file.allocate(size, dtype=torch.uint8) for size in sizes]
        for number, tensor in enumerate(tensors):
            tensor.fill_(number)
        assert [set(tensor.unique().tolist()) for tensor in tensors] == [{number} for number in range(len(sizes))]
        assert file.num_bytes == 5 * LARGE_PAGE
