"""Tokens with an adapter are those of a model with the adapter's weights merged in, whatever shares the steps."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.build import assemble
from app.config import CacheConfig, SchedulerConfig
from app.engine.request import Request
from app.errors import UnsupportedAdapter
from app.model.adapter_files import adapter_digest
from app.model.adapters import MAX_RANK, LinearUpdates, Sizes, read_adapter
from tests.kit.engine import run_to_end
from tests.kit.models import generate_plainly
from tests.lora import merge, save_adapter
from tests.model.test_equivalence import VOCAB_SIZE, build, random_requests
from tests.model.test_speculation import RecallingDrafter
from tests.tiny_models import build_tiny_model

Expected = tuple[tuple[Request, ...], dict[str, list[int]]]

# Rank and scale of each, as PEFT has them: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
ADAPTERS: dict[str, tuple[dict[str, object], float]] = {
    "all": ({"rank": 4, "seed": 1}, 8 / 4),
    "rs": ({"rank": 3, "seed": 2, "use_rslora": True, "lora_alpha": 2}, 2 / math.sqrt(3)),
    "some": ({"rank": 16, "seed": 3, "targets": ("q_proj", "v_proj", "up_proj")}, 8 / 16),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Expected]]:
    """The model's folder; requests of the base and of each adapter in turn, and what merged weights generate."""
    known: dict[str, tuple[Path, Expected]] = {}

    def find(architecture: str) -> tuple[Path, Expected]:
        if architecture not in known:
            folder = tmp_path_factory.mktemp(architecture)
            build_tiny_model(architecture).save_pretrained(folder / "base")
            requests, token_ids = list(random_requests(12, VOCAB_SIZE)), {}
            for number, (name, (fields, scale)) in enumerate(ADAPTERS.items(), start=1):
                adapter = save_adapter(folder / name, build_tiny_model(architecture), **fields)  # type: ignore[arg-type]
                merged = merge(build_tiny_model(architecture), folder / name, scale)
                merged.save_pretrained(folder / f"merged-{name}")
                own = slice(number, None, len(ADAPTERS) + 1)
                requests[own] = [dataclasses.replace(each, adapter=adapter) for each in requests[own]]
                token_ids |= generate_plainly(folder / f"merged-{name}", requests[own])
            token_ids |= generate_plainly(folder / "base", requests[:: len(ADAPTERS) + 1])
            known[architecture] = folder / "base", (tuple(requests), token_ids)
        return known[architecture]

    return find


def sizes_of(model: torch.nn.Module) -> dict[str, Sizes]:
    return {
        name: Sizes(linear.in_features, linear.out_features)
        for name, linear in model.named_modules()
        if isinstance(linear, torch.nn.Linear) and name != "lm_head"
    }


WAYS = [("llama", "torch"), ("llama", "attention"), ("llama", "decoder"), ("qwen2", "torch"), ("qwen2", "decoder")]


@pytest.mark.parametrize(("architecture", "way"), WAYS)
class TestTokensOfMergedWeights:
    def test_of_several_adapters_and_none_in_one_step(
        self, architecture: str, way: str, expected: Callable[[str], tuple[Path, Expected]]
    ) -> None:
        path, (requests, token_ids) = expected(architecture)
        assert run_to_end(build(path, way=way, num_slots=3200), *requests).token_ids == token_ids

    def test_with_chunks_preemption_and_prefix_hits(
        self, architecture: str, way: str, expected: Callable[[str], tuple[Path, Expected]]
    ) -> None:
        path, (requests, token_ids) = expected(architecture)
        engine = build(path, way=way, num_slots=160, max_step_tokens=40, prefill_chunk_tokens=7)
        assert run_to_end(engine, *requests).token_ids == token_ids
        assert engine.stats().total_preemptions > 0
        assert engine.adapters is not None
        assert all(not each.num_users for each in engine.adapters._loaded.values())


@pytest.mark.parametrize("way", ["decoder", "torch"])
def test_drafts_change_no_token(way: str, expected: Callable[[str], tuple[Path, Expected]]) -> None:
    path, (requests, token_ids) = expected("llama")
    plain = build(path, way=way)
    engine = assemble(
        SchedulerConfig(), CacheConfig(block_size=4 if way == "torch" else 16), num_blocks=200, runner=plain.runner,
        model_info=plain.model_info, adapters=plain.adapters, drafter=RecallingDrafter(token_ids),
    )  # fmt: skip
    assert run_to_end(engine, *requests).token_ids == token_ids
    assert engine.stats().total_accepted_tokens > 30


def test_one_prompt_under_two_adapters_shares_no_prefix(expected: Callable[[str], tuple[Path, Expected]]) -> None:
    path, (requests, _) = expected("llama")
    engine = build(path, way="torch")
    prompt = tuple(range(3, 35))
    under = [dataclasses.replace(each, prompt_token_ids=prompt) for each in requests[:3]]
    for request in under:
        run_to_end(engine, request)
    assert engine.stats().total_cached_tokens == 0
    run_to_end(engine, dataclasses.replace(under[1], request_id="again"))
    assert engine.stats().total_cached_tokens > 0


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [
        ({"q_proj": 2}, {"layers.0.self_attn.q_proj": 2, "layers.1.self_attn.q_proj": 2}),
        ({"proj": 2}, {}),
        ({"self_attn.q_proj": 2, "q_proj": 3}, {"layers.0.self_attn.q_proj": 2, "layers.1.self_attn.q_proj": 2}),
        ({"q_proj": 3, "self_attn.q_proj": 2}, {"layers.0.self_attn.q_proj": 3, "layers.1.self_attn.q_proj": 3}),
        ({"model.layers.1.mlp.up_proj": 1}, {"layers.1.mlp.up_proj": 1}),
        ({r"^model\.layers\.1\.mlp\.up_proj$": 1, "^q_proj": 2}, {"layers.1.mlp.up_proj": 1}),
        ({"(0.mlp.up_proj|1.mlp.down_proj)": 1}, {"layers.0.mlp.up_proj": 1, "layers.1.mlp.down_proj": 1}),
        ({"0.mlp.up_proj|1.mlp.up_proj": 1}, {"layers.0.mlp.up_proj": 1, "layers.1.mlp.up_proj": 1}),
    ],
)
def test_ranks_by_pattern_are_those_of_the_layers_that_peft_would_find(
    pattern: dict[str, int], ranks: dict[str, int], tmp_path: Path
) -> None:
    """The oracle is PEFT's own expression."""
    model, default = build_tiny_model("llama"), 4
    linears = sizes_of(model)
    found = {
        linear: next((rank for key, rank in pattern.items() if re.match(rf"(.*\.)?({key})$", linear)), default)
        for linear in linears
    }
    assert {linear.removeprefix("model."): rank for linear, rank in found.items() if rank != default} == ranks
    save_adapter(tmp_path, model, rank=default, rank_pattern=pattern)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    for linear, rank in found.items():
        down, up = (f"base_model.model.{linear}.lora_{factor}.weight" for factor in "AB")
        tensors[down], tensors[up] = tensors[down][:rank].contiguous(), tensors[up][:, :rank].contiguous()
    save_file(tensors, path)
    assert {linear: update.rank for linear, update in read_adapter(tmp_path, linears).items()} == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_adapter_does_not_change_with_its_files(dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    linears = sizes_of(model)
    for name, seed in (("old", 1), ("new", 2)):
        save_adapter(tmp_path / name, model, seed=seed)
        path = tmp_path / name / "adapter_model.safetensors"
        save_file({key: each.to(dtype) for key, each in load_file(path).items()}, path)
    expected = {
        name: (each.down.tolist(), each.up.tolist()) for name, each in read_adapter(tmp_path / "old", linears).items()
    }
    loaded = LinearUpdates(model).prepare(read_adapter(tmp_path / "old", linears))
    with (tmp_path / "old" / "adapter_model.safetensors").open("r+b") as file:  # in place, as `cp new old` does
        file.write((tmp_path / "new" / "adapter_model.safetensors").read_bytes())
    assert {name: (each.down.tolist(), each.up.tolist()) for name, each in loaded.items()} == expected


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_an_adapter_of_a_multimodal_model_is_one_of_its_language_model(prefix: str, tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    linears, path = sizes_of(model), tmp_path / "adapter_model.safetensors"
    save_adapter(tmp_path, model)
    expected = read_adapter(tmp_path, linears)
    save_file(
        {name.replace(".model.layers.", f".{prefix}layers."): each for name, each in load_file(path).items()}, path
    )
    found = read_adapter(tmp_path, linears)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[linear].up, expected[linear].up) for linear in expected)
    whole = {linear.replace("model.", "model.language_model."): sizes for linear, sizes in linears.items()}
    assert read_adapter(tmp_path, whole).keys() == whole.keys(), "and of the multimodal class without its towers"


class TestRefusals:
    """Each says what is wrong, with the numbers."""

    def read(self, folder: Path) -> None:
        read_adapter(folder, sizes_of(build_tiny_model("llama")))

    def saved(self, folder: Path, **config: object) -> Path:
        save_adapter(folder, build_tiny_model("llama"), **config)  # type: ignore[arg-type]
        return folder

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"peft_type": "IA3"}, "peft_type is IA3"),
            ({"use_dora": True}, "it uses use_dora"),
            ({"bias": "all"}, "bias is all"),
            ({"modules_to_save": ["lm_head"]}, "it uses modules_to_save"),
            ({"layer_replication": [[0, 1]]}, "it uses layer_replication"),
            ({"r": "four"}, "adapter_config.json: r: got 'four'"),
            ({"r": 8}, r"factors of 4 × 64 and 64 × 4; with rank 8, this model needs 8 × 64 and 64 × 8"),
            ({"rank": MAX_RANK + 1}, "rank 65; at most 64"),
            ({"rank_pattern": {"([a-z0-9_.]+)+!": 4}}, r"rank_pattern has '\(\[a-z0-9_\.\]\+\)\+!'; only names"),
            ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern has 'q_proj\\('; only names"),
            ({"alpha_pattern": {".*": 4}}, "alpha_pattern has '.*'; only names"),
            ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: got 0"),
            ({"rank_pattern": {"q_proj": -1}}, "rank_pattern.q_proj: got -1"),
            ({"lora_alpha": math.nan}, "lora_alpha: got nan"),
            ({"lora_alpha": 10**400}, "lora_alpha: got 1000"),
            ({"lora_alpha": 1e300}, r"not finite, or not finite after scaling by 2\.5e\+299"),
            ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern.q_proj: got inf"),
            ({"notes": "a" * (1 << 20)}, "more than 1,048,576 bytes"),
        ],
    )
    def test_of_a_configuration(self, config: dict[str, object], message: str, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedAdapter, match=message):
            self.read(self.saved(tmp_path, **config))

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ({"hidden_size": 128}, r"factors of 4 × 64 and 128 × 4; .*it is for another model"),
            ({"num_hidden_layers": 3}, r"it changes .*layers\.2"),
        ],
    )
    def test_of_another_base(self, model: dict[str, int], message: str, tmp_path: Path) -> None:
        save_adapter(tmp_path, build_tiny_model("llama", **model))
        with pytest.raises(UnsupportedAdapter, match=message):
            self.read(tmp_path)

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            ("lora_magnitude_vector", torch.ones(64), "lora_magnitude_vector, which is not a factor"),
            ("lora_A.weight", torch.full((4, 64), math.inf), "not finite"),
            ("lora_A.weight", torch.ones(4, 64, dtype=torch.int32), r"numbers of type torch\.int32"),
        ],
    )
    def test_of_tensors(self, name: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
        self.saved(tmp_path)
        path = tmp_path / "adapter_model.safetensors"
        save_file(load_file(path) | {f"base_model.model.model.layers.0.self_attn.q_proj.{name}": tensor}, path)
        with pytest.raises(UnsupportedAdapter, match=message):
            self.read(tmp_path)

    def test_of_an_unknown_target(self, tmp_path: Path) -> None:
        with pytest.raises(
            UnsupportedAdapter, match=r"it changes lm_head .* only change existing layers named .*down_proj, "
        ):
            self.read(self.saved(tmp_path, targets=("q_proj", "lm_head")))

    @pytest.mark.parametrize(
        "text", ["[" * 200_000 + "]" * 200_000, '{"r": ' + "[" * 900 + "]" * 900 + "}", "[1]", "{"]
    )
    def test_of_a_configuration_that_is_none(self, text: str, tmp_path: Path) -> None:
        self.saved(tmp_path)
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(UnsupportedAdapter, match=r"adapter_config\.json"):
            self.read(tmp_path)

    def test_of_pickled_weights(self, tmp_path: Path) -> None:
        self.saved(tmp_path)
        (tmp_path / "adapter_model.safetensors").unlink()
        (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps({}))
        with pytest.raises(UnsupportedAdapter, match=r"adapter_model\.bin, which may contain code"):
            adapter_digest(tmp_path)

    def test_of_other_files_than_the_request_means(self, tmp_path: Path) -> None:
        build_tiny_model("llama").save_pretrained(tmp_path / "base")
        engine = build(tmp_path / "base")
        adapter = save_adapter(tmp_path / "a", build_tiny_model("llama"))
        request = dataclasses.replace(
            random_requests(1, VOCAB_SIZE)[0], adapter=dataclasses.replace(adapter, digest="0123")
        )
        with pytest.raises(UnsupportedAdapter, match=r"has digest \w+ here, but 0123 where it was registered"):
            engine.add(request)
