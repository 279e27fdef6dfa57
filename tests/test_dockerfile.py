"""The Dockerfile, held against the Makefile, the README and what a wheel has: there is no Docker engine here."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
DOCKERFILE = (PROJECT / "Dockerfile").read_text()
MAKEFILE = (PROJECT / "Makefile").read_text()
COMPILERS = re.compile(r"\b(g\+\+|gcc|clang|build-essential)")


def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, its arguments) of each stage, with those of the stage that it begins with."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            origin, _, name = rest.partition(" AS ")
            current = found[name] = list(found.get(origin, []))
        else:
            current.append((instruction, rest))
    return found


def arguments_of(stage: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[stage] if name == instruction]


@pytest.mark.parametrize("stage", ["build-cpu", "build-gpu"])
def test_images_are_built_by_targets_of_the_makefile(stage: str) -> None:
    made = [target for run in arguments_of(stage, "RUN") for target in re.findall(r"(?:^|&& |\S=\S+ )make (\S+)$", run)]
    assert made == [".venv/runtime.done"] + ["native"] * (stage == "build-cpu")
    for target in made:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)
    assert "serve: .venv/runtime.done" in MAKEFILE, "what `make serve` needs is what the image is built from"


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_a_service_runs_as_the_readme_says_but_not_as_root(stage: str) -> None:
    assert stages()[stage][-1] == ("USER", "carousel")
    assert any("useradd" in run for run in arguments_of(stage, "RUN"))
    assert arguments_of(stage, "ENTRYPOINT") == ['["carousel"]']
    assert arguments_of(stage, "CMD") == ['["serve"]']
    [probe] = arguments_of(stage, "HEALTHCHECK")
    assert "http://127.0.0.1:8000/ready" in probe
    [environment] = arguments_of(stage, "ENV")
    assert "/carousel/.venv/bin" in environment
    [serves] = re.findall(r"^serve:.*\n\t@exec \$\(BIN\)/(\w+ serve) ", MAKEFILE, re.MULTILINE)
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    assert serves == "carousel serve"
    assert "carousel" in scripts


def test_the_image_for_cpus_has_native_code_and_no_compiler() -> None:
    assert not [run for run in arguments_of("cpu", "RUN") if COMPILERS.search(run)]
    [native] = [run for run in arguments_of("build-cpu", "RUN") if run.endswith("make native")]
    [environment] = arguments_of("cpu", "ENV")
    [cache] = re.findall(r"XDG_CACHE_HOME=(\S+)", native)
    assert f"XDG_CACHE_HOME={cache}" in environment, "it is looked for where it was built"
    assert cache.startswith("/carousel/"), "what is copied has it"


def test_an_image_has_all_that_it_is_built_and_served_from() -> None:
    ignored = (PROJECT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    packages = [pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]]
    needed = {"Makefile", "pyproject.toml", "constraints.txt", project["project"]["readme"], *packages}
    assert kept == needed
    assert not [name for name in kept if not (PROJECT / name).exists() or fnmatch.fnmatch(name, ".venv*")]


def test_the_commands_of_readme_and_dockerfile_are_the_same() -> None:
    said = set(re.findall(r"docker (?:build|run) [^#\n]+?(?=  |\n|$)", DOCKERFILE))
    shown = re.findall(r"^docker [^#\n]+?(?= *#|$)", (PROJECT / "README.md").read_text(), re.MULTILINE)
    assert shown
    assert {line.strip() for line in shown} <= {line.strip() for line in said}
    for line in shown:
        for target in re.findall(r"--target (\w+)", line):
            assert target in stages()
