"""Creates a model folder from a GGUF file, which is then served like any other. Each file is converted once.

The folder contains config.json, tokenizer.json and a manifest that locates each weight in the GGUF file. Only
the few weights whose values differ in transformers are stored in the folder itself.
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

_FORMAT = 5  # increase this when the content of the folders changes, so that they are recreated


def checkpoint_of(path: Path, cache: Path, report: Callable[[str], None] = logger.info) -> Path:
    """Return the folder in `cache` for the model of a GGUF file, creating it if needed.

    A file that has been changed or moved gets a new folder. If several processes call this, only one creates it.

    Raises:
        InvalidSetup: the file is not a GGUF file or is damaged, or the folder cannot be written.
        UnsupportedModel: the file's architecture, or a type or a tensor in it, is not supported.
    """
    identity = "\0".join(map(str, (_FORMAT, *DescribedFile.of(path, path.stat()))))
    target = cache / f"{path.stem[:80]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if _is_valid(target):
        return target
    file = GgufFile(path)
    description = describe(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{target.name}.lock"):
            if not _is_valid(target):
                shutil.rmtree(target, ignore_errors=True)
                _make(target, file, description, report)
    except OSError as error:
        raise InvalidSetup(
            f"{path}: the folder with its tokenizer cannot be written to {cache}: {error.strerror}; free some space, "
            f"or set XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return target


def _is_valid(folder: Path) -> bool:
    """Return whether a folder is complete, and the GGUF files have not changed since it was created."""
    try:
        return manifest_in(folder) is not None
    except (InvalidSetup, ValueError, TypeError, KeyError):  # the last three are raised if the manifest is incomplete
        return False


def _make(target: Path, file: GgufFile, description: Description, report: Callable[[str], None]) -> None:
    """Create the folder under a temporary name, then rename it, so that an interrupted run leaves no partial folder."""
    temporary = target.with_name(hidden_name(target.name))
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    report(f"Reading {file.path}: its tokenizer and the positions of its weights are stored in {target}, once")
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
    """Write the manifest, and a safetensors file with changed weights and with orders of rows and columns."""
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
    """Add an order of rows or columns to `written` and return its name, or None if nothing is reordered."""
    if order is None or np.array_equal(order, np.arange(len(order))):
        return None
    name = f"order.{hashlib.sha256(order.tobytes()).hexdigest()[:16]}"
    written[name] = order.astype(np.int64)
    return name
