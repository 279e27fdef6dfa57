"""The commands: each starts and is in the list; the services that they start are such as the service takes."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from app.config import ApplicationConfig
from benchmarks.cases import __main__ as cases
from benchmarks.chaos import stage
from benchmarks.clients import __main__ as clients
from benchmarks.service import fields, fleet, soak
from tests.test_imports import imported_modules, is_within

FOLDER = Path(benchmarks.__file__).parent
NOT_LISTED = {"bulk.counted", "chaos.doomed", "service.thousand_ingress", "service.thousand_replicas"}  # run by others
ALLOWED = ("app", "benchmarks", "torch", "transformers", "tokenizers", "pydantic")
# Imported only when they are asked for. Those of clients are run by `make clients`, each in its own environment.
EXTRA = {
    "command": ("deployments.cli",),  # types of numbers
    "counted": ("deployments",),  # puts a counting engine in the place of a bulk run's own
    **dict.fromkeys(("fleet", "online"), ("deployments",)),  # as many open files as a service
    "decisions": ("matplotlib",),  # draws with --plot
    "head": ("deployments",),  # starts a head with the launcher's variables
    "groups": ("numpy", "prometheus_client"),  # reads a live service, beside which both are
    "make_gguf": ("numpy", "gguf", "safetensors", "llama_cpp"),
    "mistral_rs": ("mistralrs",),
    "mutants": ("mutmut",),  # not among those of the tests
    "openvino_genai": ("openvino", "openvino_genai"),
    "plan_error": ("deployments",),  # compares the planner's word with what is served
    "prefixes": ("deployments",),  # a fleet that is simulated by the planner's means
    "thousand": ("deployments", "numpy"),  # the same
    # Open files, the event loop and the garbage of a service.
    **dict.fromkeys(("thousand_ingress", "thousand_sockets", "thousand_replicas"), ("deployments", "numpy", "uvloop")),
    "thousand_metrics": ("deployments", "starlette", "uvicorn"),  # the route of /metrics and its server
    "thousand_quality": ("deployments", "msgspec", "numpy"),
    "random_adapter": ("numpy", "safetensors"),
    "reenacting_runner": ("msgspec",),  # steps of the engine are its structs
    "scaling_day": ("deployments", "ray"),  # rules as Serve's controller runs them, in a simulated fleet
    "service": ("deployments",),  # starts it as the launcher does
    "llama_batched": ("llama_cpp", "numpy"),
    "llama_perplexity": ("llama_cpp", "numpy"),
    "vllm_cpu": ("vllm",),
    "with_instructor": ("instructor", "openai"),
    "with_langchain": ("langchain_openai",),
    "with_langchain_tests": ("langchain_core", "langchain_openai", "langchain_tests", "pytest"),
    "with_openai_agents": ("agents", "openai"),
    **{f"with_{name}": (name,) for name in ("anthropic", "cohere", "litellm", "lm_eval", "openai", "pydantic_ai")},
}


def programs() -> set[str]:
    """The names after `python -m benchmarks.`; the checks of single clients are run by `clients`."""
    paths = [path for path in FOLDER.rglob("*.py") if '\nif __name__ == "__main__":' in path.read_text()]
    names = (".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in paths)
    return {name.removesuffix(".__main__") for name in names if not name.startswith("clients.with_")}


def test_the_list_has_every_command_and_no_other() -> None:
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)[^`]*`", row.split("|")[1])}
    assert listed == programs() - NOT_LISTED


@pytest.mark.parametrize("name", sorted(programs() - NOT_LISTED))
def test_every_command_prints_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = f"benchmarks.{name}"
    if (found := find_spec(module)) is not None and found.submodule_search_locations is not None:
        module += ".__main__"
    with pytest.raises(SystemExit) as ended:
        import_module(module).main(["--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks.{name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "application"),
    [
        ("demo", clients.served("models/demo")),
        ("demo demo-tools", cases.served("models/demo", Path("keys.yaml"), "folder")),
        ("swept vectors", fields.application(fields._parser().parse_args([]), "models/demo", "folder")),
        ("simulated", fleet.served(fleet._parser().parse_args([]))),
        ("chaos", stage.application(crash_token_id=0, step_timeout_s=20.0, place_timeout_s=1.0)),
        ("chaos", stage.application(weights=True)),
        ("chaos", soak.served("models/demo", Path("keys.yaml"), Path("folder"), {"adapter": "at"}, num_blocks=200)),
    ],
)
def test_an_application_is_one_that_the_service_takes(names: str, application: dict[str, Any]) -> None:
    assert [model.name for model in ApplicationConfig.model_validate(application).models] == names.split()


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_only_torch_transformers_and_pydantic(path: Path) -> None:
    foreign = [
        f"line {line}: {name}"
        for line, name in imported_modules(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(is_within(name, permitted) for permitted in (*ALLOWED, *EXTRA.get(path.stem, ())))
    ]
    assert not foreign
