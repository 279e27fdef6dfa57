"""The application builder, as `serve run` and a cluster call it: without the launcher, which looks first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidSetup
from deployments.serve.application import build
from deployments.serve.settings import parse


def model(name: str, path: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "engine": {"model": {"path": path, **settings}}}


def test_all_models_that_cannot_be_served_are_told_at_once(demo_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    models = [
        model("long", str(demo_path), max_model_len=1_000_000),
        model("slip", "models/demoo"),
        model("unknown", str(tmp_path)),
        model("sound", str(demo_path)),
    ]
    with pytest.raises(InvalidSetup) as told:
        build(parse({"models": models}))
    long, slip, unknown = told.value.message.splitlines()
    assert long.startswith("models[0].engine.model.path: ")
    assert "1,000,000" in long
    assert slip == (
        "models[1].engine.model.path: got 'models/demoo'; there is no such folder or file here; did you mean "
        "'models/demo'?"
    )
    assert "models[2].engine.model.path" in unknown
    assert "did you mean 'llama'?" in unknown


@pytest.mark.parametrize("path", ["/mnt/of/another/machine", "~/of/another/machine"])
def test_a_folder_may_be_on_another_machine_of_a_cluster(path: str) -> None:
    build(parse({"models": [model("far", path)]}))


def test_a_gguf_file_has_to_be_where_the_application_is_built() -> None:
    with pytest.raises(InvalidSetup, match=r"models\[0\].engine.model.path: got '/mnt/far.gguf'; there is no such"):
        build(parse({"models": [model("far", "/mnt/far.gguf")]}))
