"""The files of a LoRA adapter: where they are, and a digest of them. No torch here."""

from __future__ import annotations

import hashlib
from pathlib import Path

from app.errors import UnsupportedAdapter, first_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DIGEST_BYTES = 8


def adapter_folder(path: str) -> Path:
    """A folder; else what is downloaded of a hub id.

    Raises UnsupportedAdapter: there is neither.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder.resolve()
    from transformers.utils.hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["adapter_*"]))
    except (OSError, ValueError) as error:
        raise UnsupportedAdapter(
            f"there is no adapter {path!r}: no such folder here, and as a hub id: {first_line(error)}"
        ) from error


def adapter_digest(folder: Path) -> str:
    """Of what the adapter computes: its configuration and its weights. Raises UnsupportedAdapter."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        except FileNotFoundError:
            raise UnsupportedAdapter(f"the adapter {folder} has no {name}{_pickled(folder)}") from None
        except OSError as error:
            raise UnsupportedAdapter(f"{folder / name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _pickled(folder: Path) -> str:
    found = [each.name for each in sorted(folder.glob("adapter_model.*")) if each.name != WEIGHTS]
    if not found:
        return ""
    return f", but {found[0]}, which can hold code; save it with safe_serialization=True"
