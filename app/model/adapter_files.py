"""Finds the files of a LoRA adapter and computes their digest. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from app.engine.request import Adapter
from app.errors import UnsupportedAdapter, first_line
from app.model.location import folder_seen_from_here, is_a_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_QUANTISED_FILE = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)\.gguf$", re.IGNORECASE)


def adapter_at(name: str, path: str) -> Adapter:
    """Return the adapter at a path, downloading it if `path` is a hub id. Raises UnsupportedAdapter."""
    return Adapter(name=name, path=path, digest=adapter_digest(adapter_folder(folder_seen_from_here(path))))


def folder_of_adapter(adapter: Adapter) -> Path:
    """Return the folder with the adapter's files on this machine. Raises UnsupportedAdapter if they are missing."""
    return adapter_folder(folder_seen_from_here(adapter.path))


def check_digest(adapter: Adapter, folder: Path) -> None:
    """Raise UnsupportedAdapter if the files in the folder differ from those that the adapter was registered with."""
    digest = adapter_digest(folder)
    if digest != adapter.digest:
        raise UnsupportedAdapter(
            f"the adapter {adapter.name} in {folder} has digest {digest} here, but {adapter.digest} where it was "
            "registered: copy the same files to every machine, and load the adapter again with /admin/adapters"
        )


def adapter_folder(path: str) -> Path:
    """Return `path` if it is a folder, else download it as a hub id. Raises UnsupportedAdapter if that fails."""
    if os.path.isdir(path):
        return Path(path).resolve()
    if is_a_path(path):
        raise UnsupportedAdapter(f"the adapter {path[:200]!r} is not a folder here; copy its files to this machine")
    from transformers.utils.hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["adapter_*"]))
    except (OSError, ValueError) as error:
        raise UnsupportedAdapter(
            f"the adapter {path[:200]!r} is not a folder here, and its download failed: {first_line(error):.300}"
        ) from error


def adapter_digest(folder: Path) -> str:
    """Return a digest of the adapter's configuration and weights. Raises UnsupportedAdapter if a file is missing."""
    digest_bytes = 8
    digest = hashlib.blake2b(digest_size=digest_bytes)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except FileNotFoundError:
            raise UnsupportedAdapter(f"the adapter {folder} has no {name}{_pickled(folder)}") from None
        except OSError as error:
            raise UnsupportedAdapter(f"{folder / name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def another_base(folder: Path, served: Sequence[str], revision: str | None) -> str | None:
    """Return a sentence to log if the adapter seems to be trained on other base weights than the served ones.

    A different name proves nothing, because copies of the same weights have many names and PEFT may write a local path.
    Only the last parts of paths and hub ids are compared. Call after the configuration has been read successfully.
    """
    config = json.loads((folder / CONFIG).read_bytes())
    name, trained_revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return None
    if _last_part(name) not in map(_last_part, served):
        return f"it was trained on {name[:200]}, but {served[0]} is served"
    if trained_revision and revision and trained_revision != revision:
        return f"it was trained on revision {trained_revision} of {name[:200]}, but {revision} is served"
    return None


def names_in_config(location: str) -> list[str]:
    """Return the model's name that its config.json records, or an empty list."""
    file = Path(location) / "config.json"
    name = json.loads(file.read_bytes()).get("_name_or_path") if file.is_file() else None
    return [name] if isinstance(name, str) and name else []


def _last_part(path: str) -> str:
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1]
    return _QUANTISED_FILE.sub("", last).removesuffix(".gguf").lower()


def _pickled(folder: Path) -> str:
    found = [each.name for each in sorted(folder.glob("adapter_model.*")) if each.name != WEIGHTS]
    if not found:
        return ""
    return f", but it has {found[0]}, which may contain code; save the adapter with safe_serialization=True"
