"""The borders between rooms, kept by a walk over the syntax trees: which room may import which."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent

# Room → what it may import beside itself: rooms of ours and third-party packages. The standard library is free to all.
ALLOWED = {
    "app": set(),
    "app.config": {"pydantic", "pydantic_core"},
    "app.errors": {"pydantic"},
    "app.culprits": set(),
    "app.fair": set(),
    "app.output_lengths": set(),
    "app.json_input": {"pydantic_core"},
    "app.json_pieces": {"pydantic_core"},
    "app.json_schema": set(),
    "app.fleet.dispatch": {"app.errors", "msgspec"},
    "app.engine": {
        "app.config", "app.culprits", "app.errors", "app.fair", "app.output_lengths", "app.versions", "msgspec",
    },
    "app.child_process": set(),
    "app.tokenizer_files": {"tokenizers", "transformers"},
    "app.progress": {"app.disk", "tqdm"},
    "app.grammar": {
        "app.child_process", "app.config", "app.errors", "app.fair", "app.json_schema", "app.engine.matcher",
        "app.engine.request", "app.tokenizer_files", "llguidance",
    },
    "app.fleet": {
        "app.fleet.dispatch", "app.culprits", "app.errors", "app.fair", "app.output_lengths",
        "app.engine.async_engine", "app.engine.prefix", "app.engine.request", "app.engine.stats",
        "app.engine.snapshot", "msgspec",
    },
    "app.model": {
        "app.config", "app.cores", "app.disk", "app.errors", "app.progress", "app.engine.batch",
        "app.engine.block_pool",
        "app.engine.largest_batch", "app.engine.logit_adjustments", "app.engine.model_runner", "app.engine.request",
        "app.engine.state_pool", "app.tokenizer_files", "torch", "transformers", "triton",
    },
    "app.model.location": {"app.child_process", "app.disk", "app.errors", "app.model.gguf"},
    "app.model.foreseen": {"app.config", "app.errors", "app.model", "huggingface_hub"},
    "app.model.adapter_files": {"app.errors", "app.engine.request", "app.model.location", "transformers"},
    "app.model.adapters": {"app.errors", "app.engine.batch", "app.model", "torch", "pydantic", "safetensors"},
    "app.model.gpu_backends": {"app.model.crash_notes",
        "app.config", "app.disk", "app.errors", "app.engine.stats", "app.versions", "annotated_types", "pydantic",
        "torch",
    },
    "app.model.gguf": {
        "app.disk", "app.errors", "app.model.architectures", "gguf", "numpy", "safetensors", "tokenizers", "torch",
        "transformers",
    },
    "app.model.cpu.checkpoint": {"app.errors", "app.model", "torch", "safetensors", "transformers"},
    "app.model.cpu.gguf_checkpoint": {"app.model", "gguf", "torch", "transformers"},
    "app.model.cpu.stored_matrix": {"app.model", "gguf", "torch"},
    "app.model.cpu.weights": {"app.model", "torch", "transformers", "pydantic"},
    "app.model.cpu.verification_cache": {"app.engine.request", "app.model", "torch", "pydantic"},
    "app.model.simulated": {
        "app.config", "app.engine.batch", "app.engine.model_runner", "app.engine.request", "pydantic",
    },
    "app.text": {
        "app.config", "app.errors", "app.engine.request", "jinja2", "msgspec", "tokenizers", "transformers",
    },
    "app.metrics": {
        "app.errors", "app.engine.histogram", "app.engine.stats", "app.engine.tuner", "app.engine.request",
        "msgspec", "prometheus_client",
    },
    "app.webhooks": {"app.config", "app.disk", "app.errors", "aiohttp", "yarl"},
    # What the API needs of it sends nothing.
    "app.webhooks.receiver": {"app.config", "app.errors", "app.webhooks.addresses", "app.webhooks.signature"},
    "app.usage": {"app.disk", "app.errors", "numpy"},
    "app.records": set(),
    "app.batches": {"app.errors", "app.json_pieces", "app.usage", "app.webhooks.receiver", "msgspec"},
    "app.jobs": {
        "app.batches", "app.config", "app.culprits", "app.disk", "app.engine.request", "app.errors", "app.fair",
        "app.json_input", "app.json_pieces", "app.records", "app.usage", "app.webhooks", "msgspec", "numpy", "pyarrow",
        "pydantic_core",
    },
    "app.api": {
        "app.batches", "app.webhooks.receiver", "app.config", "app.errors", "app.fair", "app.json_input",
        "app.json_pieces", "app.json_schema", "app.records", "app.text", "app.metrics", "app.usage", "app.versions",
        "app.engine.request", "app.engine.snapshot", "msgspec", "numpy", "starlette", "pydantic", "pydantic_core",
        "python_multipart", "typing_extensions",
    },
    "app.api.pipelines": {
        "app.api", "app.config", "app.disk", "app.errors", "app.engine.request", "app.json_pieces", "app.metrics",
        "numpy",
    },
    "app.fleet.autoscaling": {"app.config"},
    "app.build": {
        "app.child_process", "app.config", "app.cores", "app.disk", "app.errors", "app.progress", "app.engine",
        "app.grammar", "app.kv_tiers", "app.model", "torch",
    },
    "app.kv_tiers": {
        "msgspec", "numpy",
        "app.child_process", "app.config", "app.disk", "app.errors", "app.engine.block_store",
        "app.engine.model_runner", "app.engine.prefix", "app.engine.request", "app.engine.stats",
    },
    "app.rank": {"app.child_process", "app.config", "app.errors", "app.model", "torch"},
    "deployments": {
        "app", "ray", "numpy", "starlette", "pydantic", "pydantic_core", "yaml", "grpc", "opentelemetry",
        "httptools", "prometheus_client", "uvicorn",
    },
    "deployments.plan.report": {"app", "deployments.plan", "matplotlib", "yaml"},
}  # fmt: skip


def sources() -> list[Path]:
    return sorted(path for package in ("app", "deployments") for path in (PROJECT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return max((room for room in ALLOWED if is_within(module, room)), key=len)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Of its syntax tree: imports and calls."""
    return [
        node for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))
    ]  # fmt: skip


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions included."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the whole name"
            assert node.module is not None, "an absolute import names a module"
            yield node.lineno, node.module


def violations(path: Path) -> list[str]:
    module = module_name(path)
    room = room_of(module)
    allowed = ALLOWED[room] | {room} if room != "app" else ALLOWED[room]
    return [
        f"{path.relative_to(PROJECT)}:{line} imports {name}; {room} may import {', '.join(sorted(allowed))}"
        for line, name in imported_modules(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(is_within(name, permitted) for permitted in allowed)
    ]


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    assert not violations(path), "\n".join(violations(path))


def test_no_package_of_ours_reads_bytes_that_run_code() -> None:
    """Nothing that came from a client or a file is unpickled or evaluated."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for path in sources():
        assert not {name for _, name in imported_modules(path)} & forbidden, path
        calls = {
            node.func.id for node in nodes_of(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec"}, path


def imported_at_once(statements: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """What runs when a module is imported: no imports inside functions, none for type checkers."""
    for each in statements:
        match each:
            case ast.Import() | ast.ImportFrom():
                yield each
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imported_at_once(each.orelse)
            case ast.If() | ast.Try() | ast.ClassDef() | ast.With():
                for name in ("body", "orelse", "finalbody"):
                    yield from imported_at_once(getattr(each, name, []))


def test_no_module_of_the_engine_imports_another_for_its_types_only() -> None:
    """Such an import hides a circle."""
    engine = [path for path in sources() if is_within(module_name(path), "app.engine")]
    assert engine
    assert not [path for path in engine if "TYPE_CHECKING" in path.read_text()]


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    modules = {module_name(path): path for path in sources()}
    for module, path in modules.items():
        names: set[str] = set()
        for node in imported_at_once(ast.parse(path.read_text()).body):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            else:
                names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        graph[module] = (names & modules.keys()) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
