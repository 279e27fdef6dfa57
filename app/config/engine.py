"""The settings of one engine: weights, KV memory, drafts, and the record of its steps."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from app.config.base import Settings
from app.config.removed import refuse_removed
from app.config.scheduler import SchedulerConfig

MAX_LOADED_ADAPTERS = 8  # where the settings name no number
KvType = Literal["auto", "int8", "fp8"]  # of keys and values


class ModelConfig(Settings):
    """Which weights to serve and how to hold them."""

    path: str = Field("models/demo", min_length=1, description="folder of a transformers model, GGUF file, or hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: bfloat16 on CUDA; on a CPU if the checkpoint is and the native decoder is fast in "
        "it; else float32",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none",
        description="matrices packed at load. int8, int4: by the native decoder on a CPU; fp8: by the CUDA "
        "decoder, from compute capability 8.9; refused for other models",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of one replica; default: its share of the machine's cores",
    )
    backend: Literal["auto", "graphs", "eager", "triton", "library", "torch"] = Field(
        "auto",
        description="auto: the fastest code that works; torch: transformers' code with plain torch. On a GPU "
        "the backend to try first: graphs, which auto begins with; eager, the same without CUDA graphs; triton, "
        "transformers' code with our kernels for attention; library, with torch's FlashAttention, which goes on to "
        "triton. A named backend is tried even if it lost a device in a step",
    )
    require: Literal["graphs", "eager", "triton", "library"] | None = Field(
        None, description="on a GPU: no replica starts with a slower backend than this; default: any may serve"
    )
    batch_invariant: bool = Field(
        False, description="logits equal in every bit, whatever shares a request's steps; refused where it cannot be"
    )
    max_model_len: int | None = Field(None, ge=2, description="tokens of prompt + output; default: the model's limit")
    max_loaded_adapters: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="LoRA adapters in memory at once; default: 8, on a GPU only with `adapters`: their memory "
        "is taken at the start",
    )
    simulated: dict[str, Any] | None = Field(
        None,
        description="for tests and benchmarks: parameters of `SimulatedCosts` (app/model/simulated.py) instead "
        "of weights; tokenizer and config.json are those of `path`",
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
                f"{' and '.join(wrong)}; set quantization: none, or leave those at their defaults"
            )
        return self

    @property
    def quantised_by(self) -> str:
        """What computes with the quantised weights that are asked for."""
        return "the decoder for CUDA" if self.quantization == "fp8" else "the native decoder on a CPU"


class TierConfig(Settings):
    """A folder beside the KV memory: prefixes are read from it where that is quicker."""

    path: str = Field(min_length=1, description="folder, which replicas of a machine share; it holds what prompts hold")
    max_gib: float = Field(
        1.0,
        gt=0,
        description="GiB of its files, of all replicas that share it, at most; the longest unused are deleted",
    )


class CacheConfig(Settings):
    """The paged KV memory of one replica."""

    block_size: int = Field(16, ge=1, le=256, description="token slots in one block")
    memory_gib: float = Field(0.25, gt=0, description="KV memory on a CPU, GiB")
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=0.98, description="share of the GPU's memory for weights, step and KV"
    )
    dtype: KvType = Field(
        "auto",
        description="keys and values. auto: the model's; int8: by native attention on a CPU; fp8: on a GPU from"
        " compute capability 8.9",
    )
    num_blocks: int | None = Field(None, ge=1, description="number of blocks, instead of the memory settings")
    num_state_slots: int | None = Field(
        None,
        ge=2,
        description="slots for the states of recurrent layers: a running sequence needs two, each other slot keeps a"
        " prefix that can be resumed. default: four for each sequence of scheduler.max_running, in at most half of the"
        " memory, but at least eight",
    )
    tiers: tuple[TierConfig, ...] = Field(
        (), max_length=1, description="where prefixes are kept that leave the KV memory; default: nowhere"
    )


class StepLogConfig(Settings):
    """A record of every step's decisions, for `python -m benchmarks.engine.replay`."""

    path: str | None = Field(None, min_length=1, description="its folder; default: no record")
    record_prompts: bool = Field(
        True, description="prompts and outputs as token ids; else lengths and hashes, for replays without a model"
    )
    max_megabytes: int = Field(
        1024, ge=16, le=1_000_000, description="MB of the folder, at most; the oldest files are deleted"
    )


class SpeculationConfig(Settings):
    """Drafts of the next tokens, which one step checks."""

    method: Literal["lookup", "draft_model", "off"] = Field(
        "off",
        description="lookup: what followed the same tokens before, and what grammars force; draft_model: what a"
        " smaller model draws, on CPUs only; off: only what a request's `prediction` has",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="folder, GGUF file or hub id of a draft model with the same tokens; type, quantization and "
        "threads are the model's",
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
    """Everything one engine needs."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    step_log: StepLogConfig = StepLogConfig()

    @model_validator(mode="before")
    @classmethod
    def _has_no_removed_settings(cls, given: Any) -> Any:
        refuse_removed(given, within="models[].engine")
        return given

    @property
    def of_draft_model(self) -> EngineConfig | None:
        """The settings with which the draft model is loaded; None where there is none."""
        path = self.speculation.model
        if path is None:
            return None
        model = self.model.model_copy(update={"path": path, "revision": None, "max_model_len": None})
        return self.model_copy(update={"model": model, "speculation": SpeculationConfig()})

    @property
    def model_paths(self) -> dict[str, str]:
        """The folders, files or hub ids of all its models, by setting."""
        draft = self.speculation.model
        return {"model.path": self.model.path} | ({} if draft is None else {"speculation.model": draft})
