"""Damaged and foreign files end in one clear error, before anything is made of them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from app.errors import InvalidSetup, UnsupportedModel
from app.model.gguf.reader import GgufFile
from tests.model.gguf.files import tiny_model, write_gguf


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, tiny_model(num_hidden_layers=1), GGMLQuantizationType.Q8_0).read_bytes()


def read(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_a_file_that_is_cut_short_is_refused_wherever_it_ends(tmp_path: Path, content: bytes) -> None:
    file = read(tmp_path, content)
    first = min(tensor.start for tensor in file.tensors.values())
    for end in (*range(4, first, 97), first - 1, first, (first + len(content)) // 2):
        with pytest.raises(InvalidSetup, match=r"cut short.*download it again"):
            read(tmp_path, content[:end])


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b'{"a": 1}'])
def test_another_kind_of_file_is_named_as_none(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidSetup, match=r"is not a GGUF file; model\.path must be a folder, a GGUF file or a hub"):
        read(tmp_path, content)


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_another_version_is_refused_by_its_number(tmp_path: Path, content: bytes, version: int) -> None:
    with pytest.raises(InvalidSetup, match=rf"has version {version} of the GGUF format"):
        read(tmp_path, content[:4] + struct.pack("<I", version) + content[8:])


def test_damaged_counts_take_no_memory(tmp_path: Path, content: bytes) -> None:
    for place in (8, 16, 24):  # tensors, entries, the length of the first key
        with pytest.raises(InvalidSetup, match=r"damaged or cut short"):
            read(tmp_path, content[:place] + struct.pack("<Q", 2**62) + content[place + 8 :])


@pytest.mark.parametrize(("number", "name"), [(99, "99"), (GGMLQuantizationType.F64, "F64")])
def test_a_type_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes, number: int, name: str) -> None:
    place = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    with pytest.raises(UnsupportedModel, match=rf"tensor token_embd\.weight is of type {name}, which cannot be read"):
        read(tmp_path, content[:place] + struct.pack("<I", number) + content[place + 4 :])


def test_a_list_without_end_is_refused_before_it_is_read(tmp_path: Path, content: bytes) -> None:
    """Two gigabytes of metadata would be hundreds of gigabytes of Python's numbers."""
    uint8, array = 0, 9
    path = tmp_path / "many.gguf"
    with path.open("wb") as file:
        entries = struct.pack("<I", array) + struct.pack("<IQ", uint8, 2**31)
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + entries)
        file.truncate(2**31 + 2**10)  # no block of the disk is taken
    with pytest.raises(InvalidSetup, match=r"a list has 2,147,483,648 entries; at most 8,388,608 are read"):
        GgufFile(path)
