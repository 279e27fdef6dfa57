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
    """The model's weights, and the number types, device and backend that are used to compute with them."""

    path: str = Field("models/demo", min_length=1, description="folder of a transformers model, GGUF file, or hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="number type of the weights. auto: bfloat16 on CUDA, and on a CPU if the checkpoint uses it and "
        "the native decoder is fast with it; otherwise float32",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none",
        description="number type to which weight matrices are converted at load. int8, int4: on CPUs, with the native "
        "decoder; fp8: on GPUs from compute capability 8.9, with the CUDA decoder; startup fails for other models",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if the replica has a GPU")
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads per replica; default: the replica's share of the machine's cores",
    )
    backend: Literal["auto", "graphs", "eager", "triton", "library", "torch"] = Field(
        "auto",
        description="auto: the fastest backend that works. If a backend is named, no other is tried. torch: "
        "transformers' code with plain torch. The rest need a GPU. graphs: Carousel's decoder and kernels in CUDA "
        "graphs; eager: the same without CUDA graphs; triton: transformers' code with Carousel's attention kernels; "
        "library: transformers' code with torch's FlashAttention",
    )
    batch_invariant: bool = Field(
        False, description="compute bitwise equal logits in any batch; startup fails if the model cannot do this"
    )
    max_model_len: int | None = Field(None, ge=2, description="prompt and output tokens; default: the model's limit")
    max_loaded_adapters: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="maximum number of LoRA adapters in memory at once; default: 8, but on a GPU only if `adapters` "
        "is set, because the memory is allocated at startup",
    )
    simulated: dict[str, Any] | None = Field(
        None,
        description="for tests and benchmarks: parameters of `SimulatedCosts` (app/model/simulated.py), which replace "
        "the weights; the tokenizer and config.json of `path` are still used",
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
                f"quantization is {self.quantization}, which only {self.quantised_by} supports, but "
                f"{' and '.join(wrong)}; set quantization to none, or leave these settings at their defaults"
            )
        return self

    @property
    def quantised_by(self) -> str:
        """The decoder that supports this quantization."""
        return "the decoder for CUDA" if self.quantization == "fp8" else "the native decoder on a CPU"


class TierConfig(Settings):
    """A folder that stores prefixes outside the KV memory. A prefix is read from it if that is faster than prefill."""

    path: str = Field(
        min_length=1, description="folder that a machine's replicas share; its files reveal the content of prompts"
    )
    max_gib: float = Field(
        1.0, gt=0, description="maximum size of the folder's files in GiB; the least recently used files are deleted"
    )


class CacheConfig(Settings):
    """The paged KV memory of one replica."""

    block_size: int = Field(16, ge=1, le=256, description="tokens in one block")
    memory_gib: float = Field(0.25, gt=0, description="size of the KV memory in GiB, on CPUs")
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=0.98, description="fraction of a GPU's memory to use for weights, steps and KV memory together"
    )
    dtype: KvType = Field(
        "auto",
        description="number type of keys and values. auto: the model's; int8: on CPUs with native attention; fp8: on "
        "GPUs from compute capability 8.9",
    )
    num_blocks: int | None = Field(None, ge=1, description="number of blocks; overrides the memory settings")
    tiers: tuple[TierConfig, ...] = Field(
        (), max_length=1, description="storage for prefixes that are evicted from the KV memory; default: none"
    )


class StepLogConfig(Settings):
    """A record of every step's decisions, for `python -m benchmarks.engine.replay`."""

    path: str | None = Field(None, min_length=1, description="folder for the step log; default: no log")
    record_prompts: bool = Field(
        True, description="record token ids; if false, only lengths and hashes, enough for replays without a model"
    )


class SpeculationConfig(Settings):
    """Speculative decoding: the next tokens are drafted, and one step verifies all tokens of a draft."""

    method: Literal["lookup", "draft_model", "off"] = Field(
        "off",
        description="source of drafts. lookup: tokens that followed the same tokens before, and tokens that a grammar "
        "forces; draft_model: tokens from a smaller model, on CPUs only; off: only a request's `prediction`",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="folder, GGUF file or hub id of a draft model with the same tokens; it uses the served model's "
        "number type, quantization and threads",
    )

    @model_validator(mode="after")
    def _a_draft_model_is_named(self) -> SpeculationConfig:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                f"method is {self.method} and model is {self.model}; the method draft_model requires a model, and the "
                f"other methods do not use one"
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
    def draft_model_config(self) -> EngineConfig | None:
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
