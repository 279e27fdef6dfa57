"""Computes a digest of a model's weights, so that machines can tell whether their files are equal."""

from __future__ import annotations

import logging
from pathlib import Path
from zlib import crc32

from app.config import EngineConfig
from app.errors import CarouselError, described
from app.model.gguf.manifest import manifest_in
from app.model.location import resolve_model_path

logger = logging.getLogger(__name__)


def digest_of_weights(config: EngineConfig) -> int:
    """Return a number that is equal on machines with equal weights in equal types, or 0 without readable weights."""
    model = config.model
    if model.simulated is not None:
        return 0
    location = resolve_model_path(model.path)
    try:
        digest = weights_digest(location, model.revision)
    except (OSError, ValueError, CarouselError) as error:
        logger.warning("the files of %s have no digest: %s", model.path, described(error))
        return 0
    dtype: str = model.dtype
    if dtype == "auto":  # depends on the machine
        from app.model.device import dtype_of

        dtype = dtype_of(model, location).name
    # Includes the types of weights and KV memory, because replicas with different types must not resume each other's
    # requests: they would generate different tokens.
    return crc32(f"{dtype} {model.quantization} {config.cache.dtype}".encode(), digest) if digest else 0


def weights_digest(location: str, revision: str | None = None) -> int:
    """Return a digest of samples from the files of a folder or a downloaded hub id. Returns 0 if there are no files.

    Takes only milliseconds for files that have been read recently.
    """
    folder = folder_of_weights(location, revision)
    digest = 0
    num_samples = 256  # per file; enough to hit every large tensor, all of which training changes
    sample_bytes = 16 * 1024
    patterns = ("*.safetensors", "config.json")
    manifest = manifest_in(folder)
    names = {path: path.name for pattern in patterns for path in sorted(folder.glob(pattern))}
    for part, gguf in enumerate(manifest.files if manifest is not None else ()):
        names[Path(gguf.path)] = f"GGUF {part}"
    for path, name in sorted(names.items(), key=lambda each: each[1]):
        digest = crc32(f"{name} {path.stat().st_size} ".encode(), digest)
        with path.open("rb") as file:
            for sample in range(num_samples):
                file.seek(max(sample * sample_bytes, sample * path.stat().st_size // num_samples))
                digest = crc32(file.read(sample_bytes), digest)
    return digest


def folder_of_weights(location: str, revision: str | None) -> Path:
    """Return `location` if it is a folder, else the folder of a hub id that has been downloaded."""
    if Path(location).is_dir():
        return Path(location)
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(location, "config.json", revision=revision, local_files_only=True))).parent
