"""Resolves `model.path` to a folder on this machine. Does not import torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from app.child_process import PROJECT
from app.disk import cache_folder
from app.errors import InvalidSetup


def resolve_model_path(path: str) -> str:
    """Return a model's folder. The path may be relative to the working directory or the project.

    Any other path is treated as a hub id and returned unchanged. A GGUF file is converted to a folder, which takes
    seconds to minutes the first time.

    Raises:
        InvalidSetup: the file does not exist or cannot be read.
        UnsupportedModel: the file needs a feature that is not supported, which the message names.
    """
    for place in _places(path):
        if place.is_dir():
            return str(place.resolve())
        if place.is_file():
            from app.model.gguf.checkpoint import checkpoint_of

            return str(checkpoint_of(place.absolute(), cache_folder() / "models"))
    if path.endswith(".gguf"):
        raise InvalidSetup(f"model.path: got {path!r}; there is no such file here")
    return path


def is_a_path(name: str) -> bool:
    """Return whether a name can only be a path, because no hub id starts like it."""
    return name.startswith(("/", ".", "~"))


def existing_place(path: str) -> Path | None:
    """Return the folder or file that a path in the settings refers to, or None if there is none, as for a hub id."""
    # os.path is used because Path.is_dir and Path.is_file raise OSError for a name that is too long.
    return next((place for place in _places(path) if os.path.isdir(place) or os.path.isfile(place)), None)


def is_local(path: str) -> bool:
    """Return whether the path is a local folder or GGUF file, not a hub id. Raises like `resolve_model_path`."""
    return resolve_model_path(path) != path or Path(path).is_dir()


def has_chat_template(path: str) -> bool:
    """Return whether the model's files contain a chat template. Returns True for a hub id, whose files are not read."""
    folder = Path(resolve_model_path(path))
    if not folder.is_dir() or (folder / "chat_template.jinja").is_file():
        return True
    try:
        described = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return bool(described.get("chat_template"))


def folder_seen_from_here(path: str) -> str:
    """Return the local folder that a path refers to, or the path itself, which is then a hub id."""
    return next((str(place) for place in _places(path) if os.path.isdir(place)), path)


def _places(path: str) -> tuple[Path, Path]:
    """Return a path in the settings relative to the working directory, and relative to the project."""
    return Path(os.path.expanduser(path)), PROJECT / path  # Path.expanduser would raise for an unknown user
