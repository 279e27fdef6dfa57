"""Which clients there are, and what each of them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PRESENT = ("ray", "curl")  # nothing to install: one comes with the project, the other with the machine


@dataclass(frozen=True, slots=True)
class Client:
    """What is installed, and the module with its checks."""

    package: str
    module: str
    requirement: str = ""  # what pip is asked for, where it is not the package's name
    also: tuple[str, ...] = ()  # what it needs beside itself and does not say
    before: tuple[str, ...] = ()  # what has to be there before it can be built
    options: tuple[str, ...] = ()  # pip's, and
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)  # the environment's, while it is installed
    worked_around: str = "nothing"

    @property
    def requirements(self) -> tuple[str, ...]:
        return (*self.before, self.requirement or self.package, *self.also)

    @property
    def has_own_environment(self) -> bool:
        return self.package not in PRESENT


CLIENTS = (
    Client("openai", "benchmarks.clients.with_openai"),
    Client(
        "langchain-openai", "benchmarks.clients.with_langchain",
        worked_around="vectors with `check_embedding_ctx_length=False`: it would fetch OpenAI's tokenizer",
    ),
    Client(
        "litellm", "benchmarks.clients.with_litellm", also=("mcp",),
        worked_around="`mcp` is installed too, which it imports for calls with tools and does not require",
    ),
    Client("ray", "benchmarks.clients.with_ray"),
    Client("lm-eval", "benchmarks.clients.with_lm_eval", requirement="lm-eval[api,hf]==0.4.13"),
    Client(
        "aiperf", "benchmarks.clients.with_aiperf",
        worked_around="run without `HF_HUB_OFFLINE`: with it aiperf 0.13 takes no tokenizer from a folder",
    ),
    Client("guidellm", "benchmarks.clients.with_guidellm", also=("torch",)),
    # Its wheels on PyPI are for CUDA and gigabytes large. From its sources, for no device, it is Python alone; and its
    # client needs few of the packages that its server needs.
    Client(
        "vllm", "benchmarks.clients.with_vllm", requirement="vllm==0.33.0", also=("xgrammar==0.2.8", "apache-tvm-ffi"),
        before=(
            "torch", "setuptools", "setuptools-scm", "setuptools-rust", "wheel", "packaging", "jinja2", "ninja",
            "transformers>=5.16.1,<5.21.0", "fastapi>=0.133.0,<0.137.0", "llguidance>=1.7.0,<1.8.0", "aiohttp",
            "cachetools", "cbor2", "cloudpickle", "datasets", "einops", "msgspec", "openai", "orjson", "oss-harmony",
            "pandas", "partial-json-parser", "pillow", "prometheus_client", "psutil", "py-cpuinfo", "pybase64",
            "pyyaml", "pyzmq", "regex", "requests", "uvicorn", "uvloop", "watchfiles",
        ),
        options=("--no-cache-dir", "--no-build-isolation", "--no-deps", "--no-binary", "vllm"),
        variables={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
        worked_around="built from its sources for no device, without what only its server needs: its wheels are CUDA's",
    ),
    Client("schemathesis", "benchmarks.clients.with_schemathesis"),
    Client("curl", "benchmarks.clients.with_curl"),
)  # fmt: skip
