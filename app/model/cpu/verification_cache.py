"""Records that a model has been verified, so that its next start need not import transformers' model code.

Importing that code takes longer than importing torch, and only the verification of a model for the C++ decoder needs
it. A record is valid for the same model files, native library and versions. If any of these changes, the model is
verified again.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from app.engine.request import ModelInfo
from app.model.cpu.library import library
from app.model.llama import DecoderSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedModel:
    """The results of a verification. Together with the weights, they suffice to build a decoder."""

    settings: DecoderSettings
    model_info: ModelInfo  # with the model's length limit, before `max_model_len` is applied


_VERIFIED_MODEL = TypeAdapter(VerifiedModel)


def read_verified(file: Path) -> VerifiedModel | None:
    """Return the results of an earlier verification, or None if the file is missing or invalid."""
    try:
        return _VERIFIED_MODEL.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def write_verified(file: Path, verified: VerifiedModel) -> None:
    """Store the results of a verification. Only logs a warning if the file cannot be written."""
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(_VERIFIED_MODEL.dump_json(verified))
        temporary.replace(file)
    except OSError as error:
        logger.warning("the model will be verified again at its next start: %s cannot be written: %s", file, error)


def digest_of_files(location: Path, *others: object) -> str:
    """Return a digest of a model's files, of all code that reads and runs them, and of `others`.

    Weight files are not read: name, size, inode and modification time stand for their content.
    """
    code = library()
    what = hashlib.sha256()
    versions = (code._name if code is not None else "", torch.__version__, version("transformers"))
    for part in (*versions, location.resolve(), *others):
        what.update(f"{part}\0".encode())
    for path in [*sorted(location.glob("*.json")), *sorted(Path(__file__).parents[1].rglob("*.py"))]:
        what.update(path.read_bytes())
    for path in sorted(location.glob("*.safetensors")):
        stat = path.stat()
        what.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}\0".encode())
    return what.hexdigest()[:32]
