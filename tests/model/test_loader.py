from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM, LlamaConfig, OpenAIGPTConfig, RwkvConfig, T5Config, ViTConfig

from app.config import ModelConfig
from app.engine.batch import StepBatch
from app.errors import InvalidSetup, UnsupportedModel
from app.model import attention, device
from app.model.attention import AttentionRules, AttentionStep, TorchAttention
from app.model.cpu.checkpoint import Checkpoint
from app.model.device import dtype_of
from app.model.implementations.transformers_code import TransformersModel
from app.model.inputs import ModelInputs
from app.model.kv_cache import KVCache
from app.model.loader import load_runner
from app.model.source import ModelSource, module_of_transformers, module_on_device
from app.model.verification import Reference, TrialBlocks
from tests.kit.models import config_of, load
from tests.tiny_models import VOCAB_SIZE, build_tiny_model


def source_of(path: Path | str, **settings: str) -> ModelSource:
    return ModelSource(
        config=ModelConfig(path=str(path), **settings),  # type: ignore[arg-type]
        location=str(path),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_facts_come_from_the_model(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    model = load(tiny_model_path("gemma2"))
    assert model.model_info.max_model_len == 256
    assert model.model_info.vocab_size == VOCAB_SIZE
    assert model.model_info.eos_token_ids == (1,)
    assert {shape.key_dim for shape in model.layers.values()} == {16}
    assert len(model.layers) == 2


@pytest.mark.parametrize(
    ("described", "settings", "is_fast", "chosen", "reason"),
    [
        ({"dtype": "bfloat16"}, {}, True, "bfloat16", "the checkpoint's own, in which the native code is fast"),
        ({"torch_dtype": "bfloat16"}, {}, True, "bfloat16", "the checkpoint's own"),
        ({"dtype": "bfloat16"}, {}, False, "float32", "in bfloat16, but the native code is not fast in it"),
        ({"dtype": "bfloat16"}, {"backend": "torch"}, True, "float32", r"model\.backend is torch"),
        ({"dtype": "bfloat16", "architectures": ["GPT2LMHeadModel"]}, {}, True, "float32", "GPT2LMHeadModel runs"),
        ({"dtype": "float16"}, {}, True, "float32", "float16, which bfloat16 would round"),
        ({"dtype": "float32"}, {}, True, "float32", "the checkpoint's own"),
        ({}, {}, True, "float32", "specifies no other"),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, True, "bfloat16", r"set by model\.dtype"),
    ],
)
def test_the_type_follows_from_checkpoint_and_machine(  # type: ignore[no-untyped-def]
    described, settings, is_fast, chosen, reason, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "is_fast", lambda dtype: is_fast)
    whole = {"architectures": ["LlamaForCausalLM"], **described}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    found = dtype_of(ModelConfig(path=str(tmp_path), device="cpu", **settings), str(tmp_path))
    assert found.dtype is getattr(torch, chosen)
    assert re.search(reason, found.reason)


def test_the_log_says_which_type_and_why(tiny_model_path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    load(tiny_model_path("llama"), dtype="auto")
    assert "the number type is float32: the checkpoint's own" in caplog.text


def test_a_longer_context_than_the_model_has_is_refused_with_both_numbers(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    assert load(tiny_model_path("llama"), max_model_len=100).model_info.max_model_len == 100
    with pytest.raises(InvalidSetup, match=r"max_model_len is 300; .* at most 256"):
        load(tiny_model_path("llama"), max_model_len=300)


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"model.path .*nowhere"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=50), "encoder-decoder"),
        (ViTConfig(hidden_size=16), "generates text"),
        (RwkvConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50), "time mixing"),
        (OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=50), "paged|cache object"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(config, reason, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config.save_pretrained(tmp_path)
    if type(config) in AutoModelForCausalLM._model_mapping:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


@pytest.mark.parametrize("lacks", ["triton", "a compiler", "headers"])
def test_what_triton_lacks_on_a_gpu_is_told_with_the_fix(monkeypatch, tmp_path: Path, lacks: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("CC", raising=False)
    compiler, header = tmp_path / "clang", tmp_path / "Python.h"
    for each in (compiler, header):
        each.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if lacks == name else name)
    gpu, expected = torch.device("cuda"), None
    if lacks == "triton":
        expected = r"is not installed: pip install triton .*"
    else:
        assert device.why_no_triton(gpu) is None
        (compiler if lacks == "a compiler" else header).unlink()
        what = r"a C compiler \(gcc or clang\)" if lacks == "a compiler" else r"Python's headers \(.*/Python\.h\)"
        expected = rf"lacks {what}, .* apt-get install -y gcc .*, or dnf .*"
    assert re.fullmatch(expected, device.why_no_triton(gpu) or "")
    assert device.why_no_triton(torch.device("cpu")) is None


@pytest.mark.parametrize(("share", "has_mps"), [(0.5, False), (0.5, True), (1.0, False)])
def test_replicas_that_take_turns_on_a_card_are_told_of(  # type: ignore[no-untyped-def]
    tiny_model_path, monkeypatch, tmp_path: Path, caplog, share: float, has_mps: bool
) -> None:
    def no_more(*_: object) -> None:
        raise InvalidSetup("the model is not loaded")

    monkeypatch.setattr("app.model.loader.device_of", lambda config: torch.device("cuda"))
    monkeypatch.setattr("app.model.loader._load", no_more)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if has_mps:
        (tmp_path / "control").touch()
    with pytest.raises(InvalidSetup, match="not loaded"):
        load_runner(config_of(tiny_model_path("llama"), num_threads=torch.get_num_threads()), gpu_share=share)
    is_told = "num_gpus is 0.5, but MPS is not running here" in caplog.text
    assert is_told == (share < 1 and not has_mps)


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040). Please update it.\nmore"


def torch_without_its_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, built_for: str | None = "13.0") -> None:
    """What torch does where the driver is too old for its CUDA."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    signs = tmp_path / "nvidia0", tmp_path / "version"
    monkeypatch.setattr(device, "_SIGNS_OF_A_CARD", signs)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("chosen", ["auto", "cuda"])
def test_a_card_that_torch_cannot_use_is_refused_with_the_drivers_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chosen: str
) -> None:
    torch_without_its_card(monkeypatch, tmp_path)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    )
    with pytest.raises(InvalidSetup) as refused:
        device.device_of(ModelConfig(path="any", device=chosen))
    said = str(refused.value)
    assert (
        f"model.device is {chosen} and there is a GPU here ({tmp_path}/version), but torch sees no CUDA device" in said
    )
    assert "is too old (found version 12040). Please update it (the driver is 550.54.15, CUDA_VISIBLE" in said
    assert "built for CUDA 13.0; CUDA 12 needs driver 525 or newer, CUDA 13 needs 580: update the driver" in said
    assert "more" not in said.replace("or newer", "")
    assert said.endswith("or set model.device: cpu")


@pytest.mark.parametrize("how", ["no card", "hidden", "built without CUDA"])
def test_a_cpu_is_taken_where_no_card_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    torch_without_its_card(monkeypatch, tmp_path, built_for=None if how == "built without CUDA" else "13.0")
    if how != "no card":
        (tmp_path / "nvidia0").touch()
    if how == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.device_of(ModelConfig(path="any")).type == "cpu"
    with pytest.raises(
        InvalidSetup, match="built without CUDA" if how == "built without CUDA" else "driver is not loaded"
    ):
        device.device_of(ModelConfig(path="any", device="cuda"))


def test_weights_that_are_not_safetensors_are_never_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="safetensors"):
        load(tmp_path)


def test_code_in_a_model_folder_never_runs(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (tmp_path / "configuration_trap.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    (tmp_path / "modeling_trap.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "configuration_trap.Trap", "AutoModelForCausalLM": "modeling_trap.Trap"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "trap", "auto_map": auto_map}))
    with pytest.raises(InvalidSetup):
        load(tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_go_to_a_device_layer_by_layer_and_are_those_that_transformers_loads(  # type: ignore[no-untyped-def]
    tmp_path: Path, monkeypatch, architecture: str, *, is_tied: bool
) -> None:
    build_tiny_model(architecture, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    held: list[int] = []
    release = Checkpoint.release

    def releases(checkpoint: Checkpoint) -> None:
        held.append(sum(weight.nbytes for weight in checkpoint._used))
        release(checkpoint)

    monkeypatch.setattr(Checkpoint, "release", releases)
    source = source_of(tmp_path)
    ours, theirs = module_on_device(source), module_of_transformers(source)
    assert ours is not None
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours.state_dict()[name]), name
    for name, buffer in theirs.named_buffers():
        assert torch.equal(buffer, dict(ours.named_buffers())[name]), name
    assert len(held) >= 2 + theirs.config.num_hidden_layers
    assert max(held) < sum(held) / 2
    assert ours.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    assert not ours.training


def test_models_with_other_names_of_weights_are_loaded_by_transformers(tiny_model_path, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    assert module_on_device(source_of(tiny_model_path("gpt2"))) is None
    assert "its weights are read into host memory first" in caplog.text


def test_files_of_a_hub_id_are_read_where_they_were_downloaded(tiny_model_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked: list[tuple[str, object]] = []

    def download(hub_id: str, *, revision: str | None, **_: object) -> str:
        asked.append((hub_id, revision))
        return str(tiny_model_path("llama"))

    monkeypatch.setattr("transformers.utils.hub.snapshot_download", download)
    assert source_of("some/llama", revision="abc").folder == tiny_model_path("llama")
    assert asked == [("some/llama", "abc")]

    def fails(hub_id: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("transformers.utils.hub.snapshot_download", fails)
    assert source_of("some/llama", revision="abc").folder is None


class Poorly(TorchAttention):
    """Reads the wrong blocks in a later piece of a prompt, for single tokens, or of the second sequence of a step."""

    def __init__(self, cache: KVCache, *, wrong_at: int) -> None:
        super().__init__(cache, torch.device("cpu"))
        self._wrong_at = wrong_at

    def begin_step(self, batch: StepBatch, inputs: ModelInputs) -> AttentionStep:
        items, is_beside = list(batch.scheduled), len(batch.scheduled) > 1
        item = items[is_beside]
        if self._wrong_at == BESIDE if is_beside else min(item.start, 16) == self._wrong_at:
            items[is_beside] = structs.replace(item, block_ids=item.block_ids[::-1])
        return super().begin_step(StepBatch(tuple(items), ()), inputs)


BESIDE = 99


@pytest.mark.parametrize("wrong_at", [None, 8, 16, BESIDE])
@pytest.mark.parametrize("architecture", ["gemma2", "mixtral"])
def test_attention_is_compared_with_the_models_own_in_all_forms_of_a_step(  # type: ignore[no-untyped-def]
    tiny_model_path, architecture: str, wrong_at: int | None
) -> None:
    config = config_of(tiny_model_path(architecture), dtype="float32", backend="torch").model
    model = load(config.path, backend="torch")
    assert isinstance(model, TransformersModel)
    with torch.inference_mode():
        model = replace(model, reference=Reference.of(config.path, model.module, model.device))
    cache = KVCache(model.layers, num_blocks=8, block_size=4, dtype=model.dtype, device=model.device)
    attention = Poorly(cache, wrong_at=-1 if wrong_at is None else wrong_at)
    blocks = TrialBlocks(block_size=4, num_blocks=8, max_blocks=8)
    if wrong_at is None:
        model.verify_steps(attention, blocks, "none")
        for few in (
            replace(blocks, max_blocks=2),  # of a context of 8 tokens
            replace(blocks, num_blocks=1),  # in which no two sequences are in a step
            replace(blocks, max_rows=1),
            replace(blocks, max_rows=2),
            *(replace(blocks, block_size=1, max_blocks=few) for few in (1, 2, 3)),
        ):
            model.verify_steps(TorchAttention(cache, model.device), few, "none")
    else:
        what = {8: "a later piece of a prompt", 16: "single tokens", BESIDE: "tokens alongside another"}[wrong_at]
        with pytest.raises(UnsupportedModel, match=rf"with Poorly, of {what}.*, .*: the first layer's output"):
            model.verify_steps(attention, blocks, "none")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_attention_would_serve_wrongly_is_refused(tiny_model_path, monkeypatch, dtype) -> None:  # type: ignore[no-untyped-def]
    right = attention._causal

    def wrong(query, keys, values, *, start, rules):  # type: ignore[no-untyped-def]
        rules = AttentionRules(scaling=rules.scaling * 1.2, sliding_window=rules.sliding_window)
        return right(query, keys, values, start=start, rules=rules)

    load(tiny_model_path("qwen2"), dtype=dtype)
    monkeypatch.setattr(attention, "_causal", wrong)
    with pytest.raises(UnsupportedModel, match="the first layer's output differs by"):
        load(tiny_model_path("qwen2"), dtype=dtype)
