"""Makes a folder with config.json and tokenizer.json from a GGUF file, once. The folder is served like any other model.

The weights stay in the GGUF file, and the folder stores their places. A few weights have other values in transformers;
the folder stores these weights as well.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from app.disk import hidden_name, locked, sync_folder
from app.errors import InvalidSetup
from app.model.gguf.description import Description, describe, part_of
from app.model.gguf.manifest import DescribedFile, Manifest, PlacedWeight, manifest_in
from app.model.gguf.reader import GgufFile, Values
from app.model.gguf.tokenizer import save_tokenizer

logger = logging.getLogger(__name__)

_FORMAT = 5  # version of the folders; increase it when the folders' content changes


def checkpoint_of(path: Path, cache: Path, report: Callable[[str], None] = logger.info) -> Path:
    """Return the folder in `cache` with the model of a GGUF file. Make the folder if it does not exist.

    A file that was changed or moved gets a new folder. If several processes call this, one makes the folder.

    Raises:
        InvalidSetup: the file is no GGUF file or is damaged, or the disk has no space for the folder.
        UnsupportedModel: the file's architecture, or a type or a tensor in it, is not supported.
    """
    identity = "\0".join(map(str, (_FORMAT, *DescribedFile.of(path, path.stat()))))
    target = cache / f"{path.stem[:80]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if _is_sound(target):
        return target
    file = GgufFile(path)
    description = describe(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{target.name}.lock"):
            if not _is_sound(target):
                shutil.rmtree(target, ignore_errors=True)
                _make(target, file, description, report)
    except OSError as error:
        raise InvalidSetup(
            f"{path}: the folder with its tokenizer cannot be written to {cache}: {error.strerror}; free some room, or "
            f"set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return target


def _is_sound(folder: Path) -> bool:
    """Return whether a folder is complete, and no part of the GGUF file has changed since it was made."""
    try:
        return manifest_in(folder) is not None
    except (InvalidSetup, ValueError, TypeError, KeyError):  # the last three: an incomplete folder
        return False


def _make(target: Path, file: GgufFile, description: Description, report: Callable[[str], None]) -> None:
    """Make the folder under another name, then rename it."""
    temporary = target.with_name(hidden_name(target.name))
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    report(f"Reading {file.path}: its tokenizer and the places of its weights go to {target}, once")
    temporary.mkdir()
    try:
        save_tokenizer(file, temporary)
        for name, content in (
            ("config.json", description.config),
            ("generation_config.json", {"eos_token_id": description.eos_token_ids}),
        ):
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _write_weights(temporary, file, description)
        for written in temporary.iterdir():
            with written.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(folder: Path, file: GgufFile, description: Description) -> None:
    """Write the place of each weight. Changed weights, and orders of rows and columns, go to a safetensors file."""
    written: dict[str, Values] = {}
    placed: dict[str, list[PlacedWeight]] = {}
    for name, tensors in description.tensors.items():
        shape = description.shapes[name]
        if name in description.changes:
            [tensor] = tensors
            written[name] = np.ascontiguousarray(description.changes[name](file.values(tensor)).reshape(shape))
            continue
        rows, columns = (_kept(own, written) for own in (description.rows.get(name), description.columns.get(name)))
        own_shape = list(part_of(shape, len(tensors)))
        placed[name] = [
            PlacedWeight(int(each.kind), each.start, each.num_bytes, own_shape, rows, columns, each.part)
            for each in tensors
        ]
    (folder / "model.safetensors").write_bytes(save(written, metadata={"format": "pt"}))
    files = [DescribedFile.of(each.path, each.stat) for each in file.files]
    kinds = {str(int(each.kind)): each.kind.name for tensors in description.tensors.values() for each in tensors}
    Manifest(files=files, kinds=kinds, weights=placed).write(folder)


def _kept(order: Values | None, written: dict[str, Values]) -> str | None:
    """Store an order of rows or columns and return its name; None if the order is unchanged."""
    if order is None or np.array_equal(order, np.arange(len(order))):
        return None
    name = f"order.{hashlib.sha256(order.tobytes()).hexdigest()[:16]}"
    written[name] = order.astype(np.int64)
    return name
