"""Finds the folder of a model. No torch here."""

from __future__ import annotations

import json
import os
from pathlib import Path

from app.child_process import PROJECT
from app.disk import cache_folder
from app.errors import InvalidSetup


def resolve_model_path(path: str) -> str:
    """Return the folder of a path relative to the working directory or the project; else `path`, a hub id.

    For a GGUF file, return the folder that is made from the file, which takes seconds to minutes the first time.
    Raises:
        InvalidSetup: the file does not exist or cannot be read.
        UnsupportedModel: the file has a feature that is not supported; the message names the feature.
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


def existing_place(path: str) -> Path | None:
    """Return the folder or file that a path of the settings names; None if it does not exist, as for a hub id."""
    # Path.is_dir and Path.is_file raise OSError for a name that is too long.
    return next((place for place in _places(path) if os.path.isdir(place) or os.path.isfile(place)), None)


def is_local(path: str) -> bool:
    """Return whether the path is a local folder or GGUF file, and no hub id. Raises InvalidSetup for a GGUF file."""
    return resolve_model_path(path) != path or Path(path).is_dir()


def has_chat_template(path: str) -> bool:
    """Return whether the model can answer chats, judged by its local files; true for a hub id."""
    folder = Path(resolve_model_path(path))
    if not folder.is_dir() or (folder / "chat_template.jinja").is_file():
        return True
    try:
        described = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return bool(described.get("chat_template"))


def folder_seen_from_here(path: str) -> str:
    """Return the folder that the path names; else the path itself, a hub id."""
    # Path.is_dir raises OSError for a name that is too long.
    return next((str(place) for place in _places(path) if os.path.isdir(place)), path)


def _places(path: str) -> tuple[Path, Path]:
    """Return the two readings of a path in the settings: relative to the working directory, and to the project."""
    return Path(os.path.expanduser(path)), PROJECT / path  # Path.expanduser raises for an unknown user
