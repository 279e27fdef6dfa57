"""Benchmarks run where only torch, transformers and pydantic are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import benchmarks
from tests.test_imports import imported_modules, is_within

PACKAGE = Path(benchmarks.__file__).parent
ALLOWED = ("app", "benchmarks", "torch", "transformers", "tokenizers", "pydantic")
# Imported only when they are asked for. Those of clients are run by `make clients`, each in its own environment.
EXTRA = {
    "counted": ("deployments",),  # puts a counting engine in the place of a bulk run's own
    "groups": ("numpy", "prometheus_client"),  # reads a live service, beside which both are
    "openvino_genai": ("openvino", "openvino_genai"),
    "plan_error": ("deployments",),  # compares the planner's word with what is served
    "random_adapter": ("numpy", "safetensors"),
    "reenacting_runner": ("msgspec",),  # steps of the engine are its structs
    "vllm_cpu": ("vllm",),
    "with_langchain": ("langchain_openai",),
    "with_anthropic": ("anthropic",),
    "with_cohere": ("cohere",),
    "with_litellm": ("litellm",),
    "with_lm_eval": ("lm_eval",),
    "with_openai": ("openai",),
}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_a_page_imports_nothing_else(path: Path) -> None:
    foreign = [
        f"line {line}: {name}"
        for line, name in imported_modules(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(is_within(name, permitted) for permitted in (*ALLOWED, *EXTRA.get(path.stem, ())))
    ]
    assert not foreign
