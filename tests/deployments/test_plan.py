"""`python -m deployments.plan memory`: from a config.json alone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.child_process import PROJECT
from app.model.cpu.library import library
from deployments.plan.__main__ import main

# Qwen3-8B without its layers but two, so that a walk through a step takes a moment.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "vocab_size": 151936, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}  # fmt: skip
NUM_MATRICES = 2 * 4096 * (4096 * 2 + 1024 * 2 + 12288 * 3)  # numbers in those of the layers
# Of a LoRA adapter in a layer: inputs of q, k and v, of o, of gate and up, and of down; then the outputs of all.
NUMBERS_OF_RANK = 3 * 4096 + 4096 + 2 * 4096 + 12288 + 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
NUM_PARAMETERS = 2 * 151936 * 4096 + 2 * (4096 * (4096 * 2 + 1024 * 2 + 12288 * 3) + 2 * 4096 + 2 * 128) + 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def plan(model: Path, *options: str) -> int:
    return main(["memory", "--model", str(model), "--max-running", "8", "--max-step-tokens", "64", *options])


@pytest.fixture
def planned(model: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is shown for a context of 8,192 tokens and further options."""

    def of(*options: str) -> str:
        assert plan(model, "--context", "8192", *options) == 0
        return capsys.readouterr().out

    return of


def weights_line(num_bytes: float) -> str:
    return f"weights       {num_bytes / 2**30:>9.2f} GiB"


def test_the_table_says_what_fits(planned: Callable[..., str]) -> None:
    shown = planned("--gpu", "h200")
    assert weights_line(2 * NUM_PARAMETERS) in shown
    assert "8,192 bytes of KV memory per token" in shown  # 2 layers x 8 heads x 128 x (key and value) x 2 bytes
    assert "sequences of 8,192" in shown
    assert "at 4,800 GB/s" in shown
    assert "not yet measured on a GPU" in shown


@pytest.mark.parametrize(
    ("option", "share"),
    [("--gpu-memory-fraction", "40.00 GiB, 0.5 of 80.00 GiB"), ("--num-gpus", "36.00 GiB, 0.9 of 40.00 GiB")],
)
def test_half_of_the_memory_or_of_the_card_may_be_asked_for(
    option: str, share: str, planned: Callable[..., str]
) -> None:
    assert share in planned("--gpu", "80GiB", option, "0.5")


def test_a_mixture_of_experts_is_planned_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 1024, "intermediate_size": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts))
    shown = []
    for dtype in ("bfloat16", "float32"):
        assert plan(tmp_path, "--gpu", "80GiB", "--dtype", dtype) == 0
        shown.append(float(re.findall(r"weights +([\d.]+) GiB", capsys.readouterr().out)[0]))
    assert shown[1] == pytest.approx(2 * shown[0], abs=0.02)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_follow_the_longest_sequence_are_planned(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 4096}
    rotary = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0} | (factors if kind == "longrope" else {})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"rope_parameters": rotary}))
    assert plan(tmp_path, "--gpu", "80GiB", "--context", "8192") == 0
    assert "sequences of 8,192" in capsys.readouterr().out


def test_a_config_without_a_context_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(bloom))
    assert plan(tmp_path, "--gpu", "T4") == 1
    assert "does not state its context length" in capsys.readouterr().err


def test_each_of_two_cards_has_half_of_a_divided_model(planned: Callable[..., str]) -> None:
    shown = planned("--gpu", "h200", "--tensor-parallel", "2")
    whole = 151936 * 4096 + 2 * (2 * 4096 + 2 * 128) + 4096  # the embedding and the norms
    assert weights_line(2 * whole + NUM_PARAMETERS - whole) in shown
    assert "each of 2 H200" in shown
    assert "4,096 bytes of KV memory per token" in shown


def test_weights_in_fp8_are_planned_with_their_scales(planned: Callable[..., str]) -> None:
    num_rows = 2 * (4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096)
    expected = 2 * (NUM_PARAMETERS - NUM_MATRICES) + NUM_MATRICES + 4 * num_rows
    assert weights_line(expected) in planned("--gpu", "h200", "--quantization", "fp8")


def test_each_of_two_cards_has_half_of_the_matrices_in_fp8(planned: Callable[..., str]) -> None:
    of_half, of_whole = 2 * (4096 + 2 * 1024 + 2 * 12288), 2 * (4096 + 4096)  # rows of matrices that have a scale each
    norms = 2 * (2 * 4096 + 2 * 128) + 4096
    expected = 2 * (1.5 * 151936 * 4096 + norms) + NUM_MATRICES / 2 + 4 * (of_half / 2 + of_whole)
    assert weights_line(int(expected)) in planned("--gpu", "h200", "--tensor-parallel", "2", "--quantization", "fp8")


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("--gpu", "fp8"),
        pytest.param("--cpu", "int8", marks=pytest.mark.skipif(library() is None, reason="there is no C++ compiler")),
    ],
)
def test_kv_memory_in_eight_bits_is_planned_with_its_scales(where: str, kind: str, planned: Callable[..., str]) -> None:
    of_token = 2 * 8 * (2 * 128 + 2 * 4)  # layers, heads, numbers of 8 bits, scales
    shown = planned(where, "80GiB", "--dtype", "bfloat16", "--cache-dtype", kind)
    assert f"{of_token:,} bytes of KV memory per token" in shown


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_machine_with_cpus_holds_packed_weights(quantization: str, planned: Callable[..., str]) -> None:
    shown = planned("--cpu", "16GiB", "--dtype", "bfloat16", "--quantization", quantization)
    num_embeddings = 151936 * 4096
    # A group of 64 numbers of 8 bits, or of 32 of 4 bits, has 4 bytes more. The head has 8 bits with both.
    of_matrices, of_head = {"none": (2, 2), "int8": (68 / 64, 68 / 64), "int4": (20 / 32, 68 / 64)}[quantization]
    rest = NUM_PARAMETERS - NUM_MATRICES - num_embeddings
    expected = of_matrices * NUM_MATRICES + of_head * num_embeddings + 2 * rest
    assert weights_line(expected) in shown
    assert f"weights in {'bfloat16' if quantization == 'none' else quantization} (predicted)" in shown
    parts = [float(part) for part in re.findall(r"([\d.]+) GiB$", shown, re.MULTILINE)]
    assert sum(parts) == pytest.approx(16, abs=0.03)
    assert "8,192 bytes of KV memory per token" in shown
    [most] = re.findall(r"with cache\.memory_gib: ([\d.]+)$", shown, re.MULTILINE)
    assert parts[-1] - 0.016 < float(most) <= parts[-1]


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_adapters_take_of_a_cpus_memory(planned: Callable[..., str]) -> None:
    options = ("--cpu", "16GiB", "--dtype", "bfloat16")
    assert "adapters  " not in planned(*options)
    # Two layers, two bytes each.
    expected = f"adapters      {100 * 2 * 2 * 32 * NUMBERS_OF_RANK / 2**30:>9.2f} GiB"
    assert expected in planned(*options, "--adapters", "100", "--rank", "32")


def test_adapters_take_of_a_gpus_memory_what_those_of_the_highest_rank_need(planned: Callable[..., str]) -> None:
    assert "adapters  " not in planned("--gpu", "H200")
    # Between both products of a step: 512 tokens, 2 splits of the inputs, 3 parts of rank 64 in float32.
    expected = 100 * 2 * 2 * 64 * NUMBERS_OF_RANK + 100 * 2 * 7 * 4 + 512 * 2 * 3 * 64 * 4
    options = ("--gpu", "H200", "--max-step-tokens", "512", "--adapters", "100")
    assert f"adapters      {expected / 2**30:>9.2f} GiB" in planned(*options)
    # Halves of B's outputs, and of A's inputs where the layer's inputs are divided.
    part = 3 * 4096 + (4096 + 2 * 1024) // 2 + 4096 // 2 + 4096 + 2 * 4096 + 12288 + 12288 // 2 + 4096
    expected += 100 * 2 * 2 * 64 * (part - NUMBERS_OF_RANK)
    assert f"adapters      {expected / 2**30:>9.2f} GiB" in planned(*options, "--tensor-parallel", "2")


def test_adapters_on_a_gpu_need_layers_that_can_be_adapted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bloom = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "seq_length": 64}
    (tmp_path / "config.json").write_text(json.dumps(bloom))
    assert plan(tmp_path, "--gpu", "T4", "--adapters", "8", "--context", "64") == 1
    assert "on T4 does not support adapters, because the model has no linear layers with" in capsys.readouterr().err


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_a_draft_model_takes_of_a_cpus_memory(model: Path, planned: Callable[..., str]) -> None:
    found = []
    for options in ((), ("--draft-model", str(model))):
        shown = planned("--cpu", "16GiB", "--dtype", "bfloat16", *options)
        weights = re.search(r"weights +([\d.]+) GiB", shown)
        kv = re.search(r"([\d,]+) bytes of KV memory per token", shown)
        assert weights is not None
        assert kv is not None
        found.append((float(weights[1]), int(kv[1].replace(",", ""))))
    alone, both = found
    assert both == (pytest.approx(2 * alone[0], abs=0.02), 2 * alone[1])


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_states_of_recurrent_layers_are_shown_beside_the_keys_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two attention layers and two convolutions: (3 - 1) inputs of 1,024 channels in each."""
    config = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False, "max_position_embeddings": 4096, "vocab_size": 65536,
        "layer_types": ["conv", "full_attention"] * 2, "eos_token_id": 7, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(tmp_path, "--cpu", "8GiB", "--dtype", "bfloat16") == 0
    shown = capsys.readouterr().out
    state_mib = 2 * 2 * 1024 * 2 / 2**20
    assert f"32 slots of {state_mib:.1f} MiB for the states of recurrent layers" in shown
    assert re.search(r"states +0\.00 GiB", shown)
    assert plan(tmp_path, "--cpu", "1GiB", "--dtype", "bfloat16", "--max-running", "100000") == 1


def test_replicas_of_a_machine_with_cpus_share_their_weights(planned: Callable[..., str]) -> None:
    shown = planned("--cpu", "32GiB", "--dtype", "bfloat16", "--replicas", "4")
    weights, *of_each = (float(part) for part in re.findall(r"([\d.]+) GiB$", shown, re.MULTILINE))
    assert shown.count("of each of 4 replicas") == len(of_each) == 3
    assert weights + 4 * sum(of_each) == pytest.approx(32, abs=0.06)
    assert "once for all replicas" in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ("--gpu", "3GiB"),
            r"missing for one sequence of 40,960 tokens.*The smallest card on which it fits is T4 \(14\.5 GiB\)",
        ),
        (("--gpu", "H9000"), "got 'H9000'.*L4.*H200"),
        (("--gpu", "H200", "--context", "50000"), "accepts at most 40,960 tokens"),
        (
            ("--gpu", "80GiB", "--gpu-memory-fraction", "1.5"),
            r"got 1\.5; must be less than or equal to 0\.98",
        ),
        (("--gpu", "h200", "--tensor-parallel", "3"), "got 3, which does not divide num_attention_heads 32"),
        (("--gpu", "H200", "--replicas", "2"), "--replicas is only supported for CPUs"),
        (
            ("--cpu", "1GiB", "--replicas", "2", "--dtype", "bfloat16"),
            "a lower --context, --max-running, --replicas or",
        ),
        (
            ("--cpu", "1GiB", "--dtype", "bfloat16"),
            r"GiB are missing for one sequence of 40,960 .* --quantization int8",
        ),
        (("--gpu", "H200", "--adapters", "8", "--rank", "16"), "--rank is only supported for CPUs"),
        (
            ("--cpu", "16GiB", "--adapters", "8", "--rank", "65"),
            "adapters of rank 65 are not supported; the highest rank is 64",
        ),
        (("--gpu", "H200", "--draft-model", "some/model"), "--draft-model is only supported for CPUs"),
        (("--cpu", "1TB"), r"--cpu: got '1TB'; must be a size, such as 80GiB"),
        (("--cpu", "--tensor-parallel", "2"), "--tensor-parallel is only supported for GPUs"),
        (("--cpu", "--quantization", "fp8"), "only the decoder for CUDA supports, but device is cpu"),
        (("--gpu", "H200", "--quantization", "int4"), "only the native decoder on a CPU supports, but device is cuda"),
        (("--gpu", "A100", "--quantization", "fp8"), r"--quantization fp8: A100-80GB does not support FP8, .* 8\.9"),
        (("--gpu", "A100", "--cache-dtype", "fp8"), r"--cache-dtype fp8: A100-80GB does not support FP8, .* 8\.9"),
        (("--gpu", "H200", "--cache-dtype", "int8"), "--cache-dtype int8 is only supported on CPUs; GPUs support fp8"),
        (("--cpu", "--cache-dtype", "fp8"), "--cache-dtype fp8 is only supported on GPUs; CPUs support int8"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(
    options: tuple[str, ...], reason: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model, *options) == 1
    assert re.search(reason, capsys.readouterr().err, re.DOTALL)


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deployments.plan", "memory", "--model", "acme/tiny", "--cpu", "16GiB"]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and it does not listen
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        ended = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()  # the hub's client logs a line for each time that it asks again
    assert line.startswith("'acme/tiny' is not a folder here and was never downloaded, and the model hub cannot")


def test_a_model_that_transformers_code_computes_on_a_cpu_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"hidden_act": "gelu"}))
    assert plan(model, "--cpu", "16GiB") == 1
    assert "cannot be planned, because the native decoder does not support it" in capsys.readouterr().err
