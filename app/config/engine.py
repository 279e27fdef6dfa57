"""The settings of one engine: weights, KV memory, speculation and the step log."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from app.config.base import Settings
from app.config.removed import without_removed
from app.config.scheduler import SchedulerConfig

MAX_LOADED_ADAPTERS = 8  # the default of `max_loaded_adapters`
KvType = Literal["auto", "int8", "fp8"]  # number type of keys and values


class ModelConfig(Settings):
    """The model's weights, and the number types, device and backend that compute with them."""

    path: str = Field("models/demo", min_length=1, description="folder of a transformers model, GGUF file, or hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="number type of the weights. auto: bfloat16 on CUDA, and on a CPU if the checkpoint has bfloat16 "
        "and the native decoder is fast with it; otherwise float32",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none",
        description="type into which weight matrices are packed at load. int8, int4: for the native decoder on a CPU; "
        "fp8: for the CUDA decoder, from compute capability 8.9; other models are refused",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if the replica has a GPU")
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of one replica; default: the replica's share of the machine's cores",
    )
    backend: Literal["auto", "graphs", "eager", "triton", "library", "torch"] = Field(
        "auto",
        description="auto: the fastest backend that works. A replica with a named backend starts with no other: torch: "
        "transformers' code with plain torch. On a GPU: graphs: the first choice of auto; eager: as graphs, but "
        "without CUDA graphs; triton: transformers' code with Carousel's attention kernels; library: transformers' "
        "code with torch's FlashAttention",
    )
    batch_invariant: bool = Field(
        False, description="compute the same logits, bit by bit, in any batch; models that cannot do this are refused"
    )
    max_model_len: int | None = Field(None, ge=2, description="prompt and output tokens; default: the model's limit")
    max_loaded_adapters: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="maximum number of LoRA adapters in memory at once; default: 8, but on a GPU only if `adapters` "
        "is set, because their memory is allocated at the start",
    )
    simulated: dict[str, Any] | None = Field(
        None,
        description="for tests and benchmarks: parameters of `SimulatedCosts` (app/model/simulated.py) instead "
        "of weights; the tokenizer and config.json of `path` are used",
    )

    @model_validator(mode="after")
    def _quantised_weights_are_for_one_decoder(self) -> ModelConfig:
        if self.quantization == "none":
            return self
        is_fp8 = self.quantization == "fp8"
        wrong = [
            f"{name} is {value}"
            for name, value, is_wrong in (
                ("device", self.device, self.device == ("cpu" if is_fp8 else "cuda")),
                ("dtype", self.dtype, is_fp8 and self.dtype == "float32"),
                ("backend", self.backend, self.backend not in (("auto", "graphs", "eager") if is_fp8 else ("auto",))),
                ("simulated", "set", self.simulated is not None),
            )
            if is_wrong
        ]
        if wrong:
            raise ValueError(
                f"quantization is {self.quantization}, which only {self.quantised_by} computes, and "
                f"{' and '.join(wrong)}; set quantization: none, or leave these settings at their defaults"
            )
        return self

    @property
    def quantised_by(self) -> str:
        """The decoder that computes with weights of this quantization."""
        return "the decoder for CUDA" if self.quantization == "fp8" else "the native decoder on a CPU"


class TierConfig(Settings):
    """A folder for prefixes beside the KV memory. A prefix is read from the folder if that is faster than prefill."""

    path: str = Field(
        min_length=1, description="folder, shared by the replicas of a machine; its files reveal the content of prompts"
    )
    max_gib: float = Field(
        1.0, gt=0, description="maximum size of the folder's files in GiB; the least recently used files are deleted"
    )


class CacheConfig(Settings):
    """The paged KV memory of one replica."""

    block_size: int = Field(16, ge=1, le=256, description="tokens in one block")
    memory_gib: float = Field(0.25, gt=0, description="size of the KV memory on a CPU in GiB")
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=0.98, description="share of the GPU's memory for weights, one step and KV memory together"
    )
    dtype: KvType = Field(
        "auto",
        description="number type of keys and values. auto: the model's type; int8: for native attention on a CPU; fp8:"
        " for a GPU from compute capability 8.9",
    )
    num_blocks: int | None = Field(None, ge=1, description="number of blocks, in place of the memory settings")
    tiers: tuple[TierConfig, ...] = Field(
        (), max_length=1, description="storage for prefixes that leave the KV memory; default: none"
    )


class StepLogConfig(Settings):
    """A record of every step's decisions, for `python -m benchmarks.engine.replay`."""

    path: str | None = Field(None, min_length=1, description="folder of the record; default: no record")
    record_prompts: bool = Field(
        True, description="record token ids; if false, record lengths and hashes only, for replays without a model"
    )


class SpeculationConfig(Settings):
    """Speculation: the next tokens are drafted, and one step verifies all tokens of a draft."""

    method: Literal["lookup", "draft_model", "off"] = Field(
        "off",
        description="source of drafts. lookup: tokens that followed the same tokens before, and tokens that a grammar"
        " forces; draft_model: tokens of a smaller model, on CPUs only; off: only the `prediction` of a request",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="folder, GGUF file or hub id of a draft model with the same tokens; number type, quantization "
        "and threads are those of the served model",
    )

    @model_validator(mode="after")
    def _a_draft_model_is_named(self) -> SpeculationConfig:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                f"method is {self.method} and model is {self.model}: method: draft_model needs a model, and no other "
                f"method has one"
            )
        return self


class EngineConfig(Settings):
    """All settings of one engine."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    step_log: StepLogConfig = StepLogConfig()

    @model_validator(mode="before")
    @classmethod
    def _has_no_removed_settings(cls, given: Any) -> Any:
        return without_removed(given, within="models[].engine")

    @property
    def of_draft_model(self) -> EngineConfig | None:
        """The settings for loading the draft model, or None without a draft model."""
        path = self.speculation.model
        if path is None:
            return None
        model = self.model.model_copy(update={"path": path, "revision": None, "max_model_len": None})
        return self.model_copy(update={"model": model, "speculation": SpeculationConfig()})

    @property
    def model_paths(self) -> dict[str, str]:
        """The folders, files or hub ids of the served model and the draft model, by setting."""
        draft = self.speculation.model
        return {"model.path": self.model.path} | ({} if draft is None else {"speculation.model": draft})
