"""Whether two folders have the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.model.weights_digest import weights_digest


def folder_with(folder: Path, weights: bytes, config: str = "{}") -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(config)
    return str(folder)


@pytest.mark.parametrize("num_bytes", [100, 5_000_000, 30_000_000])
def test_it_is_equal_for_equal_files_and_for_no_others(tmp_path: Path, num_bytes: int) -> None:
    weights = bytes(range(250)) * (num_bytes // 250 + 1)
    digest = weights_digest(folder_with(tmp_path / "one", weights))
    assert digest == weights_digest(folder_with(tmp_path / "two", weights)) != 0
    trained = bytearray(weights)
    trained[len(weights) // 2 : len(weights) // 2 + num_bytes // 100 + 1] = b"x" * (num_bytes // 100 + 1)
    others = [
        folder_with(tmp_path / "trained", bytes(trained)),
        folder_with(tmp_path / "longer", weights + b"x"),
        folder_with(tmp_path / "config", weights, '{"rope_theta": 5}'),
    ]
    assert len({digest, *map(weights_digest, others)}) == 4


def test_without_weights_it_is_not_known(tmp_path: Path) -> None:
    assert weights_digest(str(tmp_path)) == 0
