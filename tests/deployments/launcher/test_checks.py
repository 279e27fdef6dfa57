"""Mistakes are found before Ray starts: all at once, each with its place, its value and the fix."""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from app.errors import InvalidSetup
from app.model.foreseen import _known_types
from deployments.cli import main
from deployments.launcher.checks import MISTAKES, checked
from deployments.launcher.trial import trial_config
from deployments.serve.settings import SERVE_NAMES, SERVE_YAML

Change = Callable[[dict[str, Any], Path], object]


def test_the_names_are_those_of_serve() -> None:
    levels = {
        "": ServeDeploySchema, "http_options": HTTPOptionsSchema, "grpc_options": gRPCOptionsSchema,
        "logging_config": LoggingConfig, "applications": ServeApplicationSchema, "deployments": DeploymentSchema,
    }  # fmt: skip
    assert {level: tuple(schema.model_fields) for level, schema in levels.items()} == SERVE_NAMES


def _set(path: str, value: object) -> Change:
    def change(document: dict[str, Any], _folder: Path) -> None:
        *before, last = path.split(".")
        place: Any = document
        for part in before:
            place = place[int(part)] if part.isdigit() else place.setdefault(part, {})
        place[last] = value

    return change


APP = "applications.0"
MODEL = f"{APP}.args.models.0"
ENGINE = f"{MODEL}.engine"


def _in_folder(path: str, name: str, files: dict[str, object]) -> Change:
    """A setting with a new folder."""

    def change(document: dict[str, Any], folder: Path) -> None:
        (folder / name).mkdir()
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name / file).write_text(text)
        _set(path, str(folder / name))(document, folder)

    return change


def _model(**files: object) -> Change:
    """A model's folder: files by the names without dots."""
    names = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json", "bin": "model.bin"}
    return _in_folder(f"{ENGINE}.model.path", "own", {names[each]: content for each, content in files.items()})


def _short(document: dict[str, Any], folder: Path) -> None:
    _model(config=LLAMA, weights="", tokenizer={})(document, folder)
    _set(f"{ENGINE}.model.max_model_len", 9000)(document, folder)


def _other_weights(document: dict[str, Any], folder: Path) -> None:
    _model(config=LLAMA, tokenizer={})(document, folder)
    (folder / "own" / "consolidated.safetensors").touch()


def _gguf(content: bytes) -> Change:
    def change(document: dict[str, Any], folder: Path) -> None:
        (folder / "own.gguf").write_bytes(content)
        _set(f"{ENGINE}.model.path", str(folder / "own.gguf"))(document, folder)

    return change


def _behind_a_file(path: str) -> Change:
    def change(document: dict[str, Any], folder: Path) -> None:
        (folder / "file").touch()
        _set(path, str(folder / "file" / "inner"))(document, folder)

    return change


def _keys(content: str) -> Change:
    def change(document: dict[str, Any], folder: Path) -> None:
        (folder / "keys.yaml").write_text(content)
        _set(f"{APP}.args.api", {"keys_file": str(folder / "keys.yaml")})(document, folder)

    return change


LLAMA = {"model_type": "llama", "max_position_embeddings": 512}


def _second_application(document: dict[str, Any], _: Path) -> None:
    second = copy.deepcopy(document["applications"][0]) | {"name": "other", "route_prefix": "/other"}
    second["args"]["models"][0]["engine"]["model"]["path"] = "models/demoo"
    document["applications"].append(second)


BROKEN: dict[str, tuple[Change, str]] = {
    "a port's name": (_set("http_options.prot", 8500), "http_options.prot: no such setting; did you mean 'port'?"),
    "a branch's name": (_set("http_option", {}), "http_option: no such setting; did you mean 'http_options'?"),
    "the list's name": (_set("application", []), "application: no such setting; did you mean 'applications'?"),
    "an application's name": (_set(f"{APP}.route_prefx", "/"), "applications[0].route_prefx: no such setting; did you"),
    "a deployment's name": (
        _set(f"{APP}.deployments", [{"name": "demo", "user_confg": {}}]),
        "applications[0].deployments[0].user_confg: no such setting; did you mean 'user_config'?",
    ),
    "the log's name": (_set("logging_config.log_levl", "INFO"), "logging_config.log_levl: no such setting; did you"),
    "a port": (_set("http_options.port", 80_000), "http_options.port: got 80000; must be less than or equal to 65535"),
    "a port in words": (_set("http_options.port", "http"), "http_options.port: got 'http'; must be a valid integer"),
    "a host without keys": (_set("http_options.host", "0.0.0.0"), "http_options.host: got '0.0.0.0' without API keys"),
    "a host of another machine": (_set("http_options.host", "203.0.113.9"), "http_options.host: got '203.0.113.9'"),
    "a setting of ours": (_set(f"{ENGINE}.modle", {}), "models[0].engine.modle: no such setting; did you mean 'model'"),
    "a number": (_set(f"{ENGINE}.scheduler.max_running", 0), "models[0].engine.scheduler.max_running: got 0; must be"),
    "a choice": (_set(f"{MODEL}.replicas.dispatch", "random"), "models[0].replicas.dispatch: got 'random'; must be"),
    "a pooling": (_set(f"{MODEL}.pooling", "cls"), "models[0]: pooling of demo: got 'cls', which uses"),
    "a user config": (
        _set(f"{APP}.deployments", [{"name": "replica-demo", "user_config": {"scheduler": {"max_runnning": 3}}}]),
        "user_config.scheduler.max_runnning: no such setting; did you mean 'max_running'?",
    ),
    "a deployment": (
        _set(f"{APP}.deployments", [{"name": "replica-dem"}]),
        "deployments[0].name: got 'replica-dem'; did you mean 'replica-demo'?",
    ),
    "a slip in a path": (
        _set(f"{ENGINE}.model.path", "models/demoo"),
        "got 'models/demoo'; there is no such folder or file here; did you mean 'models/demo'?",
    ),
    "a folder": (
        _set(f"{ENGINE}.model.path", "/nowhere/own"),
        "models[0].engine.model.path: got '/nowhere/own'; there",
    ),
    "no hub id": (_set(f"{ENGINE}.model.path", "my model"), "models[0].engine.model.path: got 'my model'; there is no"),
    "a draft model": (
        _set(f"{ENGINE}.speculation", {"method": "draft_model", "model": "./draft"}),
        "models[0].engine.speculation.model: got './draft'; there is no such folder or file here",
    ),
    "an adapter": (_set(f"{MODEL}.adapters", {"poet": "~/no/poet"}), "models[0].adapters.poet: got '~/no/poet'; there"),
    "a folder without config.json": (_model(tokenizer={}), "there is no config.json at"),
    "a config.json that is cut": (_model(config='{"model_type": "lla'), "config.json"),
    "a model type": (
        _model(config={"model_type": "lama"}),
        "model_type 'lama' is unknown to the installed transformers; did you mean 'llama'?",
    ),
    "a new model type": (
        _model(config={"model_type": "zzzzzz9"}),
        "'zzzzzz9' is unknown to the installed transformers; a newer",
    ),
    "a state": (_model(config={"model_type": "rwkv"}), "is a rwkv model; the time mixing of RWKV is not supported"),
    "a context": (_short, "model.max_model_len is 9,000; "),
    "no weights": (_model(config=LLAMA, tokenizer={}), "has no weights: there is no model*.safetensors"),
    "weights of torch": (
        _model(config=LLAMA, bin=""),
        "has no weights: only safetensors files are supported, not model.bin",
    ),
    "no tokenizer": (_model(config=LLAMA, weights=""), "has no tokenizer: there is no tokenizer.json"),
    "a GGUF file that is cut": (_gguf(b"GGUF\x03\0\0\0"), "is damaged or cut short: its header cannot be read beyond"),
    "a file that is no GGUF file": (_gguf(b"PK\x03\x04"), "is not a GGUF file"),
    "an old GGUF file": (_gguf(b"GGUF\x01\0\0\0"), "has version 1 of the GGUF format"),
    "too much KV memory": (_set(f"{ENGINE}.cache.memory_gib", 900_000), "need at least 1,800,000"),
    "a folder of batches": (_behind_a_file(f"{APP}.args.batches.path"), "batches.path: got"),
    "a folder of a tier": (
        _behind_a_file(f"{ENGINE}.cache.tiers.0.path"),
        "models[0].engine.cache.tiers[0].path: got",
    ),
    "a folder of a step log": (
        _behind_a_file(f"{ENGINE}.step_log.path"),
        "models[0].engine.step_log.path: got",
    ),
    "one of two applications": (_second_application, "application 'other': models[0].engine.model.path: got 'models/d"),
    "a file of keys": (
        _set(f"{APP}.args.api", {"keys_file": "/nowhere/keys.yaml"}),
        "api.keys_file: the file /nowhere/keys.yaml does not exist; create it with a list of keys",
    ),
    "no list of keys": (_keys("name: me"), "must contain a list of keys; `carousel key NAME` prints an entry"),
    "a key": (_keys("- {name: me, sha256: short}"), "keys.yaml[0].sha256: sha256 has 5 characters"),
    "a pipeline": (
        _set(f"{APP}.args.pipelines", [{"name": "p", "steps": [{"kind": "answer", "model": "other"}]}]),
        "pipelines[0].steps[0]",
    ),
    "a config.json that is a list": (_model(config=[1]), "its config.json is not a JSON object"),
    "a model type that is a list": (_model(config={"model_type": ["llama"]}), "model_type is ['llama']; it should be"),
    "a text_config that is a text": (
        _model(config={**LLAMA, "text_config": "x"}, tokenizer={}),
        "has no weights: there is no model*.safetensors",
    ),
    "weights of another kind": (_other_weights, "has no weights: there is no model*.safetensors"),
    "a folder of a user who is not here": (
        _set(f"{ENGINE}.model.path", "~nobody-here/own"),
        "models[0].engine.model.path: got '~nobody-here/own'; there is no such folder",
    ),
    "deployments without names": (
        _set(f"{APP}.deployments", ["replica-demo"]),
        "deployments[0]: got 'replica-demo'; must map names to settings",
    ),
    "deployments that are no list": (_set(f"{APP}.deployments", {"name": "x"}), "deployments: got {'name': 'x'}; must"),
    "a host with a long name": (_set("http_options.host", f"{'a' * 64}.example"), "http_options.host: got '"),
    "two models of one name": (
        lambda document, _: document["applications"][0]["args"]["models"].append(
            copy.deepcopy(document["applications"][0]["args"]["models"][0])
        ),
        "several models, adapters or pipelines are named demo",
    ),
    "GPUs for a CPU": (
        _set(f"{MODEL}.replicas.num_gpus", 1),
        "models[0].replicas.num_gpus: got 1 with engine.model.device 'cpu'",
    ),
}


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """The config of `make serve`, on a port that is free, with folders of its own."""
    document: dict[str, Any] = yaml.safe_load(SERVE_YAML.read_text())
    document["http_options"]["port"] = 1  # nobody listens there
    args = document["applications"][0]["args"]
    args["batches"]["path"] = str(tmp_path / "batches")
    args["models"][0]["engine"]["model"]["device"] = "cpu"
    return document


def written(document: dict[str, Any], folder: Path) -> Path:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_told_with_its_place(name: str, document: dict[str, Any], tmp_path: Path) -> None:
    change, expected = BROKEN[name]
    change(document, tmp_path)
    path = written(document, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    _, mistakes = checked(path)
    assert any(expected in line for line in mistakes), mistakes
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


def test_a_sound_config_has_no_mistakes(document: dict[str, Any], tmp_path: Path) -> None:
    file, mistakes = checked(written(document, tmp_path))
    assert mistakes == []
    assert [where for where, _ in file.models] == ["models[0]"]


@pytest.mark.parametrize("name", ["models/demo-2", "models/other", "Qwen/Qwen3-0.6B"])
def test_a_hub_id_beside_a_folder_of_another_size_is_no_slip(
    name: str, document: dict[str, Any], tmp_path: Path
) -> None:
    _set(f"{ENGINE}.model.path", name)(document, tmp_path)
    assert checked(written(document, tmp_path))[1] == []


def test_names_that_yaml_uses_again_are_no_mistakes(document: dict[str, Any], tmp_path: Path) -> None:
    document["x-common"] = {"num_replicas": 2}
    assert checked(written(document, tmp_path))[1] == []


def test_a_port_in_use_is_no_mistake_without_a_start(document: dict[str, Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = document["http_options"]["port"] = server.getsockname()[1]
        path = written(document, tmp_path)
        assert checked(path, is_starting=False)[1] == []
        [mistake] = checked(path)[1]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; stop the process that `ss -ltnp" in mistake


def test_all_mistakes_are_told_at_once(document: dict[str, Any], tmp_path: Path) -> None:
    """Also those of a model in an application that has another mistake."""
    names = ["a port's name", "a slip in a path", "a folder of a tier", "too much KV memory", "a pipeline"]
    for name in names:
        BROKEN[name][0](document, tmp_path)
    _, mistakes = checked(written(document, tmp_path))
    assert len(mistakes) == len(names)
    for name in names:
        assert any(BROKEN[name][1] in line for line in mistakes), name


def test_the_types_of_models_are_those_of_transformers() -> None:
    missing = CONFIG_MAPPING_NAMES.keys() - {*_known_types()}
    assert not {each for each in missing if each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert len(missing) < 20


def test_the_command_takes_no_time_and_starts_no_ray(document: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a port's name", "a new model type", "a file that is no GGUF file"):
        BROKEN[name][0](document, tmp_path)
    path = written(document, tmp_path)
    code = (
        "import sys; from deployments.cli import main; status = main(sys.argv[1:]); "
        "print(status, sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code, "check", str(path)], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout.splitlines()[-1] == f"{MISTAKES} []"
    assert done.stderr.startswith(f"{path} cannot be served (2 mistakes):\n")
    # CPU time of its own: other processes may be at work on this machine.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        (str(SERVE_YAML), 0, ""),
        ("smollm2", 0, "smollm2: no mistakes found."),
        ("models/demo", 0, "models/demo: no mistakes found."),
        ("models/dem", MISTAKES, "did you mean 'models/demo'?"),
        ("smolm", MISTAKES, "got 'smolm', which is not a folder or GGUF file; known names are smollm2, gemma3"),
        ("", MISTAKES, "got '', which is not a folder or GGUF file"),
        ("/nowhere/serve.yaml", MISTAKES, "/nowhere/serve.yaml: No such file or directory"),
    ],
)
def test_models_and_files_are_checked(
    what: str, status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SERVE_YAML.parents[1])
    assert main(["check", what]) == status
    assert said in "".join(capsys.readouterr())


def test_a_model_that_is_not_there_writes_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InvalidSetup, match=r"got '/no/such/model'; there is no such folder or file here"):
        trial_config("/no/such/model")
    assert not list(tmp_path.iterdir())
