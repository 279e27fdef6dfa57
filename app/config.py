"""All settings, as one frozen tree that is read once at the edge. Nothing here reads the environment.

A config says what was asked. What is measured (how many KV blocks fit, how long the model's context is) is returned
by the room that measured it and never written back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.fields import FieldInfo

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


class Settings(BaseModel):
    """Base of every branch: frozen, and a misspelt field is an error, not silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Settings):
    """Which weights to serve and how to hold them."""

    path: str = Field("models/demo", min_length=1, description="folder of a transformers model, or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on CUDA, float32 on CPU")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    num_threads: int = Field(1, ge=1, le=1024, description="CPU threads of one replica's model")
    native_decoder: bool = Field(True, description="Llama-like models wholly in C++ on a CPU; else transformers' code")
    native_attention: bool = Field(True, description="attention in C++ on a CPU, built on first use; else plain torch")
    packed_weights: bool = Field(True, description="weights packed for oneDNN on a CPU, layers with one input joined")
    cuda_graphs: bool = Field(True, description="decode steps replayed from CUDA graphs on a GPU")
    batch_invariant: bool = Field(
        False, description="a request's logits equal in every bit whatever shares its steps; refused where it cannot be"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="tokens of prompt + output; default: the model's own limit"
    )


class CacheConfig(Settings):
    """The paged KV memory of one replica."""

    block_size: int = Field(16, ge=1, le=256, description="token slots in one block")
    memory_gib: float = Field(0.25, gt=0, description="KV memory on a CPU, GiB")
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=0.98, description="share of the GPU's memory for weights, step and KV"
    )
    num_blocks: int | None = Field(None, ge=1, description="exact number of blocks, instead of the memory settings")
    prefix_caching: bool = Field(True, description="share the KV of equal prompt prefixes between requests")


class SchedulerConfig(Settings):
    """What one step may do, and who goes first."""

    strategy: Literal["continuous"] = Field("continuous", description="when waiting requests may join")
    policy: Literal["fcfs"] = Field("fcfs", description="which of them goes first")
    max_running: int = Field(32, ge=1, le=4096, description="requests computed in one step, at most")
    max_waiting: int = Field(256, ge=0, le=1_000_000, description="requests queued on one replica, at most")
    max_step_tokens: int = Field(512, ge=1, le=1_000_000, description="token budget of one step")
    prefill_chunk_tokens: int = Field(256, ge=1, le=1_000_000, description="tokens of one prompt in one step, at most")

    @property
    def max_requests(self) -> int:
        """Requests one replica holds at once, running and waiting. Serve's own limits are derived from it."""
        return self.max_running + self.max_waiting

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> SchedulerConfig:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} is below max_running={self.max_running}: "
                f"every running request needs one token a step; raise max_step_tokens or lower max_running"
            )
        return self


class EngineConfig(Settings):
    """Everything one engine needs."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()


class ReplicasConfig(Settings):
    """How many copies of one engine run, on what, and how requests are spread over them."""

    num_replicas: int = Field(2, ge=1, le=1024, description="engines serving this model")
    num_cpus: float = Field(0.5, gt=0, description="CPUs Ray reserves for each")
    num_gpus: float = Field(0, ge=0, description="GPUs Ray reserves for each")
    dispatch: Literal["round_robin", "least_loaded"] = Field("least_loaded", description="how a replica is chosen")
    drain_timeout_s: float = Field(120.0, gt=0, description="seconds a stopping replica may finish what it has")


class ServedModelConfig(Settings):
    """One model of the application: the name clients use, its engine and its replicas."""

    name: Name = Field("demo", description="what a client sends as `model`")
    engine: EngineConfig = EngineConfig()
    replicas: ReplicasConfig = ReplicasConfig()


class ApiConfig(Settings):
    """Limits on what one HTTP request may ask."""

    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="bytes of one HTTP body")
    max_choices: int = Field(16, ge=1, le=1024, description="highest `n`")
    max_prompts: int = Field(128, ge=1, le=10_000, description="prompts × n in one completions call")
    max_stop_strings: int = Field(4, ge=1, le=64, description="entries of `stop`")
    max_stop_length: int = Field(256, ge=1, le=4096, description="characters of one stop string")


class IngressConfig(Settings):
    """The HTTP side."""

    num_replicas: int = Field(1, ge=1, le=256, description="ingress processes")
    num_cpus: float = Field(0.25, gt=0, description="CPUs Ray reserves for each")


class ApplicationConfig(Settings):
    """The `args` of the Serve application: what `deployments/serve.yaml` holds."""

    models: tuple[ServedModelConfig, ...] = Field((ServedModelConfig(),), min_length=1, description="models to serve")
    api: ApiConfig = ApiConfig()
    ingress: IngressConfig = IngressConfig()

    @model_validator(mode="after")
    def _names_are_unique(self) -> ApplicationConfig:
        names = [model.name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"models have the same name: {', '.join(twice)}; give each its own")
        return self


def leaves(branch: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below a branch of the tree, by its dotted path; `[]` marks a list of branches."""
    for name, field in branch.model_fields.items():
        inner = _branch_of(field)
        if inner is None:
            yield f"{path}{name}", field
        else:
            yield from leaves(inner, f"{path}{name}{'[]' if get_origin(field.annotation) is tuple else ''}.")


def _branch_of(field: FieldInfo) -> type[BaseModel] | None:
    candidates: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
