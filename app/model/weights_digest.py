"""A number that tells whether two machines have the same weights in their files. No torch here."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32


def weights_digest(location: str, revision: str | None = None) -> int:
    """Of a folder, or of what was downloaded of a hub id, by samples spread over its files.

    Takes milliseconds for files that have just been read. 0 where there are no such files.
    """
    folder = Path(location)
    if not folder.is_dir():
        folder = _downloaded(location, revision)
    digest = 0
    num_samples = 256  # of a file: training changes every large tensor of a model, and each has several of them
    sample_bytes = 16 * 1024
    patterns = ("*.safetensors", "config.json")
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        digest = crc32(f"{path.name} {path.stat().st_size} ".encode(), digest)
        with path.open("rb") as file:
            for sample in range(num_samples):
                file.seek(max(sample * sample_bytes, sample * path.stat().st_size // num_samples))
                digest = crc32(file.read(sample_bytes), digest)
    return digest


def _downloaded(hub_id: str, revision: str | None) -> Path:
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(hub_id, "config.json", revision=revision, local_files_only=True))).parent
