"""Text of checkpoints that also read images: the tokens are those of the whole model's `generate`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from app.build import build_sync_engine
from app.errors import UnsupportedModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.language_model import plain_name, plain_names
from app.model.planned_memory import planned_memory
from tests.kit.engine import run_to_end
from tests.kit.models import config_of, generate_plainly, load
from tests.model.test_equivalence import random_requests
from tests.tiny_models import SHAPE, VOCAB_SIZE

TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
         "num_heads": 2, "num_key_value_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 64,
         "position_embedding_size": 64}  # fmt: skip
WITH_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0}
# By the type of the whole: settings of its text. Classes of transformers compute llava's, gemma3's and gemma4's text,
# those of plain models qwen3_vl's and qwen3_vl_moe's, and the multimodal class itself glm4v's.
WHOLE: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llama"},
    "gemma3": {"head_dim": 16, "sliding_window": 9},
    "gemma4": {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "qwen3_vl": {
        "rope_parameters": WITH_SECTIONS | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_moe": {
        "rope_parameters": WITH_SECTIONS | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "glm4v": {"rope_parameters": WITH_SECTIONS | {"mrope_section": [4, 2, 2]}},
}  # fmt: skip


def save_whole(folder: Path, model_type: str) -> PreTrainedModel:
    """A tiny random model for images and text."""
    torch.manual_seed(5)
    configuration = CONFIG_MAPPING[model_type]
    tower, text = (
        configuration().vision_config or configuration.sub_configs["vision_config"](),
        {"eos_token_id": None, "tie_word_embeddings": False} | WHOLE[model_type],
    )
    sizes = {name: size for name, size in TOWER.items() if name in tower.to_dict()}
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        configuration(
            text_config=SHAPE | text,
            vision_config={"model_type": tower.model_type} | sizes,
            eos_token_id=1,
            tie_word_embeddings=text["tie_word_embeddings"],
        )
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.25)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", WHOLE)
def test_text_is_that_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    whole, requests = save_whole(tmp_path, model_type), random_requests(3, VOCAB_SIZE - 8)
    expected = {key: ids for each in requests for key, ids in generate_plainly(whole, [each]).items()}
    scheduler = {"max_running": 8, "max_step_tokens": 40, "prefill_chunk_tokens": 7}
    engine = build_sync_engine(config_of(tmp_path, cache={"num_blocks": 80}, scheduler=scheduler, num_threads=1))
    assert run_to_end(engine, *requests).token_ids == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 10, "tokens vary"
    assert engine.model_info.eos_token_ids == (1,), "as the whole says"


def without_towers(folder: Path) -> tuple[int, int]:
    """Takes the weights of towers from a checkpoint. Returns the numbers that its text and its towers have."""
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    text = {name: weight for name, weight in weights.items() if "vis" not in name and "projector" not in name}
    save_file(text, file)
    num_numbers = sum(weight.numel() for weight in text.values())
    return num_numbers, sum(weight.numel() for weight in weights.values()) - num_numbers


@pytest.mark.parametrize("model_type", WHOLE)
def test_towers_are_neither_read_nor_held(model_type: str, tmp_path: Path) -> None:
    save_whole(tmp_path, model_type)
    num_of_text, num_of_towers = without_towers(tmp_path)
    most = 1.1 * num_of_text  # our own decoder fills rows of weights up
    assert num_of_text + num_of_towers > 1.2 * num_of_text
    assert sum(tensor.numel() for tensor in load(tmp_path).tensors()) < most
    config = config_of(tmp_path, cache={"num_blocks": 8}, dtype="float32")
    assert planned_memory(config).needs.weights < 4 * most


def test_a_checkpoint_without_text_is_refused(tmp_path: Path) -> None:
    save_whole(tmp_path, "llava")
    (file,) = tmp_path.glob("*.safetensors")
    save_file({name: weight for name, weight in load_file(file).items() if "vis" in name}, file)
    with pytest.raises(UnsupportedModel, match=r"none of the language model's 21 weights, such as lm_head\.weight"):
        load(tmp_path)


def test_a_checkpoint_without_text_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_whole(tmp_path, "llava")
    (file,) = tmp_path.glob("*.safetensors")
    towers = {name: weight for name, weight in load_file(file).items() if "vis" in name}
    save_file(towers, file)
    monkeypatch.setattr(TransformersModel, "load", None)
    with pytest.raises(UnsupportedModel, match=f"none of the language model's .* but {len(towers)} other weights"):
        load(tmp_path)


def test_a_checkpoint_that_lacks_a_file_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of towers: a half of a download may lack more than one thinks."""
    save_whole(tmp_path, "llava")
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    towers = {name for name in weights if "vis" in name}
    places = {name: "towers.safetensors" if name in towers else file.name for name in weights}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    monkeypatch.setattr(TransformersModel, "load", None)
    words = f"lists 2 files, but 1 of them, with {len(towers)} weights, are missing, such as towers.safetensors"
    with pytest.raises(UnsupportedModel, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("llava", {"text_config": {"model_type": "llama4_text"}},
         "has layers without paged attention: chunked_attention"),
        ("blip", {}, "cannot generate text from text alone: BlipForConditionalGeneration needs pixel_values"),
        ("diffusion_gemma", {}, "DiffusionGemmaForBlockDiffusion has its own `generate`"),
        ("kimi_linear", {}, r"recurrent layers that are not supported: Kimi Delta Attention \(KDA\)"),
        ("rwkv", {}, "recurrent layers that are not supported: the time mixing of RWKV"),
        ("xlstm", {}, "recurrent layers that are not supported: the matrix memory of xLSTM"),
        ("recurrent_gemma", {}, "recurrent layers that are not supported: the RG-LRU of Griffin"),
        ("deepseek_v32", {}, r"indexed_attention \(an indexer selects the tokens that a token attends to\)"),
        ("deepseek_v4", {}, r"compressed_sparse_attention \(several tokens share one compressed key and value\)"),
        ("evolla", {"architectures": ["EvollaForProteinText2Text"]},
         "is not a text, image or video model that transformers lists: EvollaForProteinText2Text"),
        ("siglip", {}, "is not a model that generates text"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_by_its_config_alone(
    model_type: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[model_type](**settings).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.language_model.norm.weight", "language_model.model.norm.weight"])
def test_names_of_weights_lose_what_the_whole_puts_before_them(name: str) -> None:
    assert plain_name(name) == "model.norm.weight"
    assert plain_name(name.replace("norm", "layers.0.mlp.up_proj")) == "model.layers.0.mlp.up_proj.weight"
    assert plain_name("language_model.lm_head.weight") == plain_name("lm_head.weight") == "lm_head.weight"


def test_a_checkpoints_own_names_are_those_that_transformers_knows() -> None:
    """As Cosmos 3 writes them: layers.0.self_attn.to_q."""
    names = plain_names(CONFIG_MAPPING["cosmos3_omni"]())
    found = "layers.0.self_attn.to_q.weight"
    for pattern, replacement in names.items():
        found = re.sub(pattern, replacement, found)
    assert found == "model.layers.0.self_attn.q_proj.weight"
