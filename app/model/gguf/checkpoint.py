"""A folder of safetensors, config.json and tokenizer.json made of a GGUF file, once; it is served like any other."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from app.disk import hidden_name, locked, sync_folder
from app.errors import InvalidSetup
from app.model.gguf.description import Description, describe
from app.model.gguf.reader import GgufFile
from app.model.gguf.tokenizer import save_tokenizer

logger = logging.getLogger(__name__)

_FORMAT = 2  # of the folders; a change of what is written into them gets another number


def checkpoint_of(path: Path, cache: Path, report: Callable[[str], None] = logger.info) -> Path:
    """The folder in `cache` with the model of a GGUF file; it is made if it is not there.

    A file that has changed, or lies elsewhere, gets another folder. Of several processes one makes it, the others wait.

    Raises:
        InvalidSetup: the file is no GGUF file or damaged, or there is no room for the folder.
        UnsupportedModel: its architecture, a type or a tensor in it cannot be read.
    """
    stat = path.stat()
    identity = f"{_FORMAT}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    target = cache / f"{path.stem[:80]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if target.is_dir():
        return target
    file = GgufFile(path)
    description = describe(file)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{target.name}.lock"):
            if not target.is_dir():
                _make(target, file, description, report)
    except OSError as error:
        raise InvalidSetup(
            f"{path}: its weights cannot be written to {cache}: {error.strerror}; free some room, or set "
            f"XDG_CACHE_HOME to a folder on another disk"
        ) from error
    return target


def _make(target: Path, file: GgufFile, description: Description, report: Callable[[str], None]) -> None:
    """Make the folder under another name, then rename it."""
    temporary = target.with_name(hidden_name(target.name))
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    num_bytes = sum(tensor.num_value_bytes for tensor in description.tensors.values())
    free = shutil.disk_usage(target.parent).free
    reserve_bytes = 64 * 2**20  # that stay free beside the weights: tokenizer and configuration are smaller
    if free < num_bytes + reserve_bytes:
        raise InvalidSetup(
            f"{file.path}: its weights take {num_bytes:,} bytes in {target.parent}, of which {free:,} are free; free "
            f"some room, or set XDG_CACHE_HOME to a folder on another disk"
        )
    report(f"Reading {file.path} into {target}, {num_bytes / 1e6:,.0f} MB, once")
    temporary.mkdir()
    try:
        save_tokenizer(file, temporary)
        for name, content in (
            ("config.json", description.config),
            ("generation_config.json", {"eos_token_id": description.eos_token_ids}),
        ):
            (temporary / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _write_weights(temporary / "model.safetensors", file, description, report)
        sync_folder(temporary)
        temporary.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(path: Path, file: GgufFile, description: Description, report: Callable[[str], None]) -> None:
    """One safetensors file, tensor by tensor: the library's own function takes all of them at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in description.tensors.items():
        start, end = end, end + tensor.num_value_bytes
        header[name] = {
            "dtype": tensor.value_type.safetensors,
            "shape": description.shapes[name],
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    said_at = time.monotonic()
    report_s = 2.0
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in description.tensors.items():
            values = file.values(tensor)
            if name in description.changes:
                values = np.ascontiguousarray(description.changes[name](values))
            assert values.nbytes == tensor.num_value_bytes, f"{name} has another type or size"
            out.write(values.data.cast("B"))
            if time.monotonic() > said_at + report_s:
                said_at = time.monotonic()
                report(f"  {header[name]['data_offsets'][1] / end:.0%} of the weights")
        out.flush()
        os.fsync(out.fileno())
