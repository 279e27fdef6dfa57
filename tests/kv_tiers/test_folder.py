"""Files of blocks: what is written is read, whatever else happens to the folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from app.kv_tiers.folder import BlockFolder
from app.kv_tiers.tier_store import this_minute
from tests.conftest import PROJECT
from tests.waiting import eventually

NAMESPACE = bytes(range(16))
TOKENS = tuple(range(4))
TENANT = "a tenant"


def folder_in(path: Path, *, max_bytes: int = 1 << 20, namespace: bytes = NAMESPACE) -> BlockFolder:
    folder = BlockFolder(path, namespace=namespace, max_bytes=max_bytes)
    folder.refresh()
    return folder


def content_of(number: int, num_bytes: int = 96) -> memoryview:
    return memoryview(bytearray(random.Random(number).randbytes(num_bytes)))


def name_of(number: int) -> bytes:
    return number.to_bytes(20, "big")


def keep(folder: BlockFolder, number: int, *, tenant: str = TENANT, num_bytes: int = 96) -> None:
    folder.write(name_of(number), tenant, TOKENS, content_of(number, num_bytes))


def is_read(folder: BlockFolder, number: int, token_ids: tuple[int, ...] = TOKENS, *, num_bytes: int = 96) -> bool:
    """Whether a block is read; then it is what it was."""
    content = content_of(-1, num_bytes)
    was_read = folder.read(name_of(number), TENANT, token_ids, content)
    assert not was_read or content == content_of(number, num_bytes)
    return was_read


def files_in(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and each.name != ".lock")


def test_a_block_is_read_as_it_was_written_by_this_process_and_by_others(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    keep(folder, 1)
    for each in (folder, folder_in(tmp_path)):
        assert each.has(name_of(1))
        assert is_read(each, 1)
        assert not each.has(name_of(2))
        assert not is_read(each, 2)


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    keep(folder_in(tmp_path), 1)
    assert not folder_in(tmp_path, namespace=bytes(16)).has(name_of(1))


def test_what_others_write_and_delete_is_learnt(tmp_path: Path) -> None:
    ours, theirs = folder_in(tmp_path), folder_in(tmp_path)
    keep(theirs, 1)
    assert not ours.has(name_of(1))
    ours.refresh()
    assert ours.has(name_of(1))
    files_in(tmp_path)[0].unlink()
    assert not is_read(ours, 1)
    assert not ours.has(name_of(1))
    theirs.refresh()
    assert not theirs.has(name_of(1))


def test_a_block_that_was_written_in_part_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "rename", lambda path, target: target)  # as if killed before it
    keep(folder_in(tmp_path), 1)
    assert len(files_in(tmp_path)) == 1
    assert not folder_in(tmp_path).has(name_of(1))


def test_a_process_that_is_killed_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    code = f"""
import random
from itertools import count
from pathlib import Path
from app.kv_tiers.folder import BlockFolder
folder = BlockFolder(Path({str(tmp_path)!r}), namespace={NAMESPACE!r}, max_bytes=1 << 30)
for number in count():
    content = memoryview(bytearray(random.Random(number).randbytes(200_000)))
    folder.write(number.to_bytes(20, "big"), {TENANT!r}, {TOKENS!r}, content)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT) as writer:
        eventually(lambda: len(files_in(tmp_path)) > 20)
        writer.kill()
    folder = folder_in(tmp_path)
    numbers = [number for number in range(100_000) if folder.has(name_of(number))]
    assert len(numbers) >= 20
    for number in numbers:
        content = memoryview(bytearray(200_000))
        assert folder.read(name_of(number), TENANT, TOKENS, content)
        assert content == content_of(number, 200_000)


def test_a_name_with_other_tokens_is_not_read(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    keep(folder, 1)
    assert not is_read(folder, 1, (9, 9, 9, 9))


@pytest.mark.parametrize("num_bytes", [96, 3 * 4096 + 40])  # less than a page, and more
@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_file_is_never_read_and_is_deleted(tmp_path: Path, seed: int, num_bytes: int) -> None:
    folder, rng = folder_in(tmp_path), random.Random(seed)
    keep(folder, 1, num_bytes=num_bytes)
    (file,) = files_in(tmp_path)
    data = bytearray(file.read_bytes())
    match seed % 5:
        case 0:  # bits are flipped, anywhere
            for bit in rng.sample(range(8 * len(data)), rng.choice([1, 2, 3, 500])):
                data[bit // 8] ^= 1 << bit % 8
        case 3:  # parts have changed places
            size = len(data) // 3
            data[-size:], data[-2 * size : -size] = data[-2 * size : -size], data[-size:]
        case 4:  # a part was never written
            at = rng.randrange(len(data) // 2)
            data[at : at + len(data) // 3] = bytes(len(data) // 3)
        case 1:  # it is cut off
            del data[rng.randrange(len(data)) :]
        case 2:
            data += b"more"
    file.write_bytes(data)
    assert not is_read(folder, 1, num_bytes=num_bytes)
    assert not file.exists()
    keep(folder, 1, num_bytes=num_bytes)
    assert is_read(folder, 1, num_bytes=num_bytes)


def test_the_longest_unused_blocks_are_deleted_where_there_are_too_many(tmp_path: Path) -> None:
    keep(folder_in(tmp_path), 0)
    of_block = files_in(tmp_path)[0].stat().st_size
    folder = folder_in(tmp_path, max_bytes=10 * of_block)
    for number in range(1, 10):
        keep(folder, number)
    for age, file in enumerate(sorted(files_in(tmp_path), key=lambda each: each.name, reverse=True)):
        os.utime(file, (1e9 - age, 1e9 - age))
    folder.note_use(name_of(0), this_minute(), 1)
    keep(folder, 10)
    assert len(files_in(tmp_path)) == 9
    assert [number for number in range(11) if folder.has(name_of(number))] == [0, *range(3, 11)]


def test_a_tenant_that_fills_the_folder_loses_its_own_blocks_first(tmp_path: Path) -> None:
    keep(folder_in(tmp_path), 0, tenant="another")
    of_block = files_in(tmp_path)[0].stat().st_size
    folder = folder_in(tmp_path, max_bytes=10 * of_block)
    os.utime(files_in(tmp_path)[0], (0, 0))  # the oldest of all
    for number in range(1, 100):
        keep(folder, number)
    assert is_read(folder, 0)
    assert len(files_in(tmp_path)) <= 10


def test_blocks_of_other_models_count_too(tmp_path: Path) -> None:
    other = folder_in(tmp_path, namespace=bytes(16))
    for number in range(8):
        keep(other, number)
    of_block = files_in(tmp_path)[0].stat().st_size
    folder = folder_in(tmp_path, max_bytes=8 * of_block)
    for number in range(8):
        keep(folder, number)
        assert len(files_in(tmp_path)) <= 8
    assert folder.has(name_of(7))


def test_several_writers_keep_the_bound_together_though_none_has_looked_at_the_others(tmp_path: Path) -> None:
    keep(folder_in(tmp_path), 0)
    of_block = files_in(tmp_path)[0].stat().st_size
    writers = [folder_in(tmp_path, max_bytes=10 * of_block, namespace=bytes([n % 2] * 16)) for n in range(4)]
    most = 0
    for number in range(1, 60):
        keep(writers[number % 4], number, tenant=f"tenant {number % 3}")
        most = max(most, len(files_in(tmp_path)))
    assert 8 <= most <= 10


@pytest.mark.parametrize("left", [b"", b"odd", (1 << 40).to_bytes(8, "little")])
def test_files_are_counted_anew_where_the_number_is_missing_or_too_high(tmp_path: Path, left: bytes) -> None:
    folder = folder_in(tmp_path)
    for number in range(5):
        keep(folder, number)
    of_block = files_in(tmp_path)[0].stat().st_size
    (tmp_path / ".lock").write_bytes(left)
    other = folder_in(tmp_path, max_bytes=6 * of_block)
    keep(other, 5)
    assert len(files_in(tmp_path)) == 6, "all had room"
    keep(other, 6)
    assert len(files_in(tmp_path)) == 5


def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    folder = folder_in(path)
    keep(folder, 1)
    for each in sorted(path.rglob("*"), reverse=True):
        each.unlink() if each.is_file() else each.rmdir()
    path.rmdir()
    assert not is_read(folder, 1)
    folder.refresh()
    keep(folder, 2)
    assert is_read(folder, 2)


def test_a_full_disk_leaves_no_file_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_in(tmp_path)
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, parts[0][:10]))
    with pytest.raises(OSError, match="No space left"):
        keep(folder, 1)
    monkeypatch.undo()
    assert not folder.has(name_of(1))
    assert not folder_in(tmp_path).has(name_of(1))


def test_a_folder_that_others_may_write_into_is_not_used(tmp_path: Path) -> None:
    folder_in(tmp_path)
    (tmp_path / NAMESPACE[:8].hex()).chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write to it"):
        folder_in(tmp_path)


def test_only_its_owner_may_look(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    keep(folder_in(path), 1)
    for each in (path, *path.rglob("*")):
        assert each.stat().st_mode & 0o077 == 0, each
