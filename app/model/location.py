"""Where a model lies. No torch here."""

from __future__ import annotations

import json
import os
from pathlib import Path

from app.child_process import PROJECT
from app.disk import cache_folder
from app.errors import InvalidSetup


def resolve_model_path(path: str) -> str:
    """A folder seen from the working directory or from the project; else `path`, a hub id.

    Of a GGUF file, the folder that is made of it, which takes seconds to minutes the first time.

    Raises:
        InvalidSetup: there is no such file, or it cannot be read.
        UnsupportedModel: something in the file cannot be read; the message names it.
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
    """The folder or the file that a path of the settings means; None where there is none, as for a hub id."""
    # Not those of Path, which raise OSError for a name that is too long.
    return next((place for place in _places(path) if os.path.isdir(place) or os.path.isfile(place)), None)


def is_local(path: str) -> bool:
    """Whether a model path is a folder or a GGUF file here; else it is a hub id. Raises InvalidSetup for the file."""
    return resolve_model_path(path) != path or Path(path).is_dir()


def has_chat_template(path: str) -> bool:
    """Whether a model can answer chats, as far as its files here say; true for a hub id."""
    folder = Path(resolve_model_path(path))
    if not folder.is_dir() or (folder / "chat_template.jinja").is_file():
        return True
    try:
        described = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return bool(described.get("chat_template"))


def folder_seen_from_here(path: str) -> str:
    """The folder of that path; else the path itself, a hub id."""
    # Not Path.is_dir, which raises OSError for a name that is too long.
    return next((str(place) for place in _places(path) if os.path.isdir(place)), path)


def _places(path: str) -> tuple[Path, Path]:
    """What a path of the settings may mean: seen from the working directory, or from the project."""
    return Path(os.path.expanduser(path)), PROJECT / path  # that of Path raises for a user who is not here
