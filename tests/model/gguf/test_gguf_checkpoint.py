"""A GGUF file is served as the model that was written into it, or refused by name."""

from __future__ import annotations

import errno
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.constants import GGMLQuantizationType
from hypothesis import given, strategies
from hypothesis import settings as settings_of
from transformers import Qwen2Tokenizer

from app.build import build_sync_engine
from app.errors import InvalidSetup, UnsupportedModel
from app.model.gguf.checkpoint import checkpoint_of
from app.model.gguf.manifest import manifest_in
from app.model.location import has_chat_template, resolve_model_path
from app.model.weights_digest import weights_digest
from app.text import Tokenizer
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of, generate_plainly
from tests.model.gguf.files import END, START, TOKENS, read_gguf, tiny_model, write_gguf

KINDS = [GGMLQuantizationType[name] for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q4_K Q6_K".split()]
PROMPT = tuple(range(40, 60))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "carousel" / "models"


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*(("llama", kind) for kind in KINDS), *((name, KINDS[3]) for name in ("gemma4_experts", "mixtral", "qwen3_moe"))],
    ids=str,
)
def test_its_weights_are_what_its_blocks_stand_for(
    architecture: str, kind: GGMLQuantizationType, tmp_path: Path, cache: Path
) -> None:
    model = tiny_model(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    made = read_gguf(path, cache)
    expected = model.state_dict()
    assert expected.keys() == made.state_dict().keys()
    for name, weight in made.state_dict().items():
        assert torch.equal(weight, expected[name]), name


ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "olmo2",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_large",
    "gemma4_experts",
    "granite",
    "granitemoehybrid",
    "lfm2",
    "ministral3",
    "phi3",
    "qwen3_5",
    "qwen3_5_moe_text",
    "smollm3",
]


@pytest.mark.parametrize(
    ("tied", "architecture"),  # Gemma 2 has no head of its own at llama.cpp
    [(tied, name) for tied in (True, False) for name in ARCHITECTURES if tied or name != "gemma2"],
)
def test_each_architecture_computes_what_it_did(architecture: str, tied: bool, tmp_path: Path, cache: Path) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    made = read_gguf(write_gguf(tmp_path / "tiny.gguf", model), cache)
    token_ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        # Norms less one, and logarithms, are rounded once more; the layers make more of that.
        assert torch.allclose(made(token_ids).logits, model(token_ids).logits, atol=1e-3)


@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "mixtral",
        "qwen3_moe",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4_large",
        "granite",
        "granitemoehybrid",
        "lfm2",
        "ministral3",
        "phi3",
        "qwen3_5",
    ],
)
def test_an_engine_gives_the_models_greedy_tokens(architecture: str, tmp_path: Path, cache: Path) -> None:
    model = tiny_model(architecture)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    engine = build_sync_engine(config_of(path, cache={"num_blocks": 16}, dtype="float32"))
    assert engine.model_info.eos_token_ids == (END,)
    request = make_request(PROMPT, max_tokens=12, ignore_eos=True)
    assert run_to_end(engine, request).token_ids == generate_plainly(model, [request])


@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        ({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}, {}),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
         {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    ],
    ids=["llama3", "linear"],
)  # fmt: skip
def test_scaled_positions_stay_scaled(
    parameters: dict[str, Any], settings: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    model = tiny_model(rope_parameters=parameters)
    tensors = {}
    if parameters["rope_type"] == "llama3":
        plain = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).model.rotary_emb.inv_freq
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", model, settings=settings, tensors=tensors)
    made = read_gguf(path, cache)
    assert torch.allclose(made.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-5)


def test_experts_of_an_architecture_that_has_none_are_refused(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3"), settings={"qwen3.expert_count": 4})
    with pytest.raises(UnsupportedModel, match=r"qwen3\.expert_count is 4, which cannot be read"):
        checkpoint_of(path, cache)


def test_the_tokenizer_has_its_special_tokens_and_its_chat_template(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    tokenizer = Tokenizer.load(str(checkpoint_of(path, cache)))
    for text in ("the hen  saw 12 of them", "été 日本 😀\n\tx"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("he t", add_special_tokens=True) == (TOKENS.index("he"), TOKENS.index("Ġt"))
    assert tokenizer.encode_chat([{"role": "user", "content": "he"}]) == (START, TOKENS.index("he"), END)
    assert tokenizer.special_token_ids == {START, END}


def test_a_tokenizer_that_begins_texts_does_so(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), settings={"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.load(str(checkpoint_of(path, cache)))
    assert tokenizer.encode("he", add_special_tokens=True) == (START, TOKENS.index("he"))
    assert tokenizer.encode("he", add_special_tokens=False) == (TOKENS.index("he"),)


RULES = {  # names of `tokenizer.ggml.pre`, and the pieces of "a  1234"
    "gpt-2 olmo granite-docling": ["a", "Ġ", "Ġ", "123", "4"],
    "smollm refact starcoder command-r": ["a", "ĠĠ", "1", "2", "3", "4"],
    "llama-bpe chatglm-bpe dbrx": ["a", "Ġ", "Ġ", "123", "4"],
    "qwen2 hunyuan stablelm2": ["a", "Ġ", "Ġ", "1", "2", "3", "4"],
    "deepseek-coder": ["a", "ĠĠ", "1", "2", "3", "4"],
    "deepseek-v3": ["a", "ĠĠ", "123", "4"],
}


@pytest.mark.parametrize(("rule", "pieces"), [(rule, own) for rules, own in RULES.items() for rule in rules.split()])
def test_text_is_split_by_the_rule_of_the_file(rule: str, pieces: list[str], tmp_path: Path, cache: Path) -> None:
    tokens = [*TOKENS[:-2], "12", "123", "ĠĠ", "<|start|>", "<|end|>"]
    settings = {
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
        "tokenizer.ggml.merges": ["h e", "Ġ t", "1 2", "12 3", "Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=len(tokens)), settings=settings)
    tokenizer = Tokenizer.load(str(checkpoint_of(path, cache)))
    ids = tokenizer.encode("a  1234", add_special_tokens=False)
    assert tokenizer.token_texts(ids) == pieces


def test_its_tokens_are_those_of_transformers_own_class(tmp_path: Path, cache: Path) -> None:
    """Qwen's tokenizer, of the same vocabulary."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), settings={"tokenizer.ggml.pre": "qwen2"})
    tokenizer = Tokenizer.load(str(checkpoint_of(path, cache)))
    vocabulary = {token: place for place, token in enumerate(TOKENS)}
    own = Qwen2Tokenizer(vocab=vocabulary, merges=[("h", "e"), ("Ġ", "t")], unk_token=None, eos_token="<|end|>")

    @settings_of(max_examples=300, deadline=None)
    @given(strategies.text(strategies.sampled_from("he tT1é日😀\n\r'’sDMlL.-_/\u0301\u00a0")))
    def check(text: str) -> None:
        expected = own(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == tuple(expected)

    check()


def test_a_vocabulary_of_sentencepiece_is_read(tmp_path: Path, cache: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helo", "he", "▁he", "ll"]
    settings = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0 - index for index in range(len(pieces) - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": None,  # older files do not say it; such a vocabulary begins texts
    }
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(vocab_size=len(pieces)), settings=settings)
    tokenizer = Tokenizer.load(str(checkpoint_of(path, cache)))
    ids = tokenizer.encode("hello é", add_special_tokens=True)
    assert tokenizer.token_texts(ids) == ["<s>", "▁he", "ll", "o", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello é"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    said: list[str] = []
    first = checkpoint_of(path, cache, said.append)
    assert len(said) == 1
    assert checkpoint_of(path, cache, said.append) == first
    assert len(said) == 1
    write_gguf(path, tiny_model(), GGMLQuantizationType.Q8_0)
    assert checkpoint_of(path, cache, said.append) != first


def test_several_at_once_make_one_folder(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    said: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: checkpoint_of(path, cache, said.append), range(4)))
    assert len(folders) == 1
    assert len(said) == 1


def test_what_a_killed_process_left_is_removed(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    folder = checkpoint_of(path, cache)
    left = folder.rename(cache / f".{folder.name}.tmp")
    (left / "config.json").unlink()
    assert checkpoint_of(path, cache) == folder
    assert (folder / "config.json").exists()
    assert not left.exists()


def test_a_path_may_name_a_file(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    assert Path(resolve_model_path(str(path))).parent == cache
    with pytest.raises(InvalidSetup, match=r"there is no such file here"):
        resolve_model_path(str(tmp_path / "other.gguf"))


def test_a_full_disk_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())

    def write(*_given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("app.model.gguf.checkpoint.save_tokenizer", write)
    with pytest.raises(InvalidSetup, match=r"cannot be written to .*: No space left on device; free some space, .*XDG"):
        checkpoint_of(path, cache)


def test_the_folder_has_no_copy_of_the_weights(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("gemma3"), GGMLQuantizationType.Q4_K)
    folder = checkpoint_of(path, cache)
    assert (folder / "model.safetensors").stat().st_size < 0.05 * path.stat().st_size


@pytest.mark.parametrize("change", ["written again", "gone"])
def test_a_file_that_changes_while_it_is_loaded_is_named(change: str, tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    folder = checkpoint_of(path, cache)
    if change == "gone":
        path.unlink()
    else:
        write_gguf(path, tiny_model(), GGMLQuantizationType.Q8_0)
    message = (
        "has the weights of this model, but cannot be read: No such"
        if change == "gone"
        else "has changed since it was read"
    )
    with pytest.raises(InvalidSetup, match=message):
        manifest_in(folder)


def test_the_same_file_elsewhere_has_the_same_digest(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), GGMLQuantizationType.Q8_0)
    (tmp_path / "other").mkdir()
    copy = shutil.copy(path, tmp_path / "other" / "copy.gguf")
    other = write_gguf(tmp_path / "b.gguf", tiny_model(initializer_range=0.2), GGMLQuantizationType.Q8_0)
    digests = [weights_digest(str(checkpoint_of(Path(each), cache))) for each in (path, copy, other)]
    assert digests[0] == digests[1] != digests[2]


def split(path: Path, folder: Path, count: int = 3) -> list[Path]:
    """The same model in parts, as `llama-gguf-split` makes them."""
    folder.mkdir(exist_ok=True)
    reader, parts = GGUFReader(path), []
    for number in range(count):
        parts.append(folder / f"tiny-{number + 1:05}-of-{count:05}.gguf")
        writer = GGUFWriter(parts[-1], str(reader.fields["general.architecture"].contents()))
        for key, field in (reader.fields if number == 0 else {}).items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                kind = field.types[0]
                writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_model_in_parts_is_the_model(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), GGMLQuantizationType.Q4_K)
    first, *others = split(path, tmp_path / "parts")
    whole, joined = (read_gguf(each, cache).state_dict() for each in (path, first))
    assert all(torch.equal(weight, joined[name]) for name, weight in whole.items())
    with pytest.raises(InvalidSetup, match=r"is not the first of its 3 parts; set model.path to tiny-00001-of-00003"):
        checkpoint_of(others[0], cache)
    before = checkpoint_of(first, cache)
    assert checkpoint_of(first, cache) == before
    others[1].touch()
    manifest_in(checkpoint_of(first, cache))  # described again
    others[1].unlink()
    with pytest.raises(InvalidSetup, match=r"tiny-00003-of-00003\.gguf cannot be read: No such file"):
        checkpoint_of(first, cache)
    (tmp_path / "links").mkdir()
    for part in split(path, tmp_path / "blobs"):
        (tmp_path / "links" / part.name).symlink_to(part.rename(part.with_suffix("")))  # as the hub's cache has them
    assert resolve_model_path(str(tmp_path / "links" / first.name))
    renamed = first.rename(first.with_name("tiny.gguf"))
    with pytest.raises(InvalidSetup, match=r"is one of 3 parts, but its name does not end in -00001-of-00003\.gguf"):
        checkpoint_of(renamed, cache)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_all_tokens_that_end_a_text_are_known(backend: str, tmp_path: Path, cache: Path) -> None:
    """Gemma has one for texts and another one for turns."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), settings={"tokenizer.ggml.eot_token_id": START})
    engine = build_sync_engine(config_of(path, cache={"num_blocks": 16}, dtype="float32", backend=backend))
    assert set(engine.model_info.eos_token_ids) == {START, END}


def test_a_folder_that_was_written_in_part_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    folder = checkpoint_of(path, cache)
    (folder / "gguf.json").write_text("")
    assert manifest_in(checkpoint_of(path, cache)) is not None


def test_what_a_model_sees_images_with_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    writer = GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"only a model's image encoder \(mmproj\); set model.path to the GGUF"):
        checkpoint_of(path, cache)


def test_a_transformers_that_is_too_old_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf", None)  # an import of it fails
    with pytest.raises(InvalidSetup, match=r"GGUF files need transformers 5.18 or newer, but 5\..* is installed"):
        checkpoint_of(path, cache)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model())
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(InvalidSetup, match=r"cannot be written to .*models: "):
        checkpoint_of(path, cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"general.architecture": "mamba"}}, r"architecture 'mamba'; only GGUF files of llama, qwen2"),
        ({"settings": {"llama.expert_shared_count": 8}}, r"llama\.expert_shared_count is 8, which cannot be read"),
        ({"settings": {"llama.expert_count": 2, "llama.expert_used_count": 3}}, r"expert_used_count is 3, which"),
        ({"settings": {"llama.rope.scaling.type": "longrope"}}, r"llama\.rope\.scaling\.type is 'longrope'"),
        ({"settings": {"llama.rope.dimension_count": 32}}, r"llama\.rope\.dimension_count is 32"),
        ({"settings": {"llama.context_length": None}}, r"llama\.context_length is None"),
        ({"settings": {"llama.attention.head_count": [4, 4]}}, r"llama\.attention\.head_count is \[4, 4\]"),
        ({"settings": {"llama.feed_forward_length": 128}},
         r"blk\.0\.ffn_gate\.weight has the shape \[256, 256\]; expected \[128, 256\]"),
        ({"settings": {"tokenizer.ggml.pre": "new"}}, r"tokenizer\.ggml\.pre 'new' is not supported"),
        ({"settings": {"llama.block_count": 4_000_000_000}}, r"llama\.block_count is 4000000000"),
        ({"settings": {"llama.block_count": 2.0}}, r"llama\.block_count is 2\.0"),
        ({"settings": {"tokenizer.ggml.merges": ["h e", "x y z"]}}, r"its tokenizer \(gpt2, gpt-2\) cannot be read"),
        ({"settings": {"tokenizer.ggml.tokens": [*TOKENS, "more"]}}, r"261 tokens, but the model has 260"),
        ({"settings": {"tokenizer.ggml.model": "rwkv"}}, r"its tokenizer \(rwkv, gpt-2\) cannot be read"),
        ({"settings": {"tokenizer.ggml.eos_token_id": 999}}, r"its tokenizer \(gpt2, gpt-2\) cannot be read"),
        ({"settings": {"llama.attention.head_count": 3, "llama.attention.key_length": 64}},
         r"its settings do not describe a llama model: \w+Error: .*hidden"),
        ({"without": "blk.1.ffn_up.weight"}, r"has no tensor blk\.1\.ffn_up\.weight"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}},
         r"tensor blk\.0\.ffn_gate_inp\.weight is not part of a llama model"),
        ({"tensors": {"rope_freqs.weight": np.full(32, 3, np.float32)}}, r"rope_freqs\.weight scales positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), **changes)
    with pytest.raises(UnsupportedModel, match=message):
        checkpoint_of(path, cache)
    assert not [left for left in cache.glob("*") if left.is_dir()]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma4", {"without": "rope_freqs.weight"}, r"tensor rope_freqs\.weight does not show which part of a head"),
        ("gemma4", {"without": "blk.4.layer_output_scale.weight"}, r"has no tensor blk\.4\.layer_output_scale\.weight"),
        ("gemma4", {"settings": {"gemma4.attention.sliding_window_pattern": [True, False]}},
         r"sliding_window_pattern is \[True, False\], which"),
        ("gemma4", {"settings": {"gemma4.attention.key_length_swa": 32}}, r"attention\.value_length_swa is 64, which"),
        ("gemma4_experts", {"without": "blk.0.ffn_up_exps.weight"}, r"has no tensor blk\.0\.ffn_up_exps\.weight"),
        ("granitemoehybrid", {"settings": {"granitehybrid.attention.head_count_kv": [0, 0, 0]}},
         r"attention\.head_count_kv is 0, which"),
        ("granitemoehybrid", {"settings": {"granitehybrid.attention.head_count_kv": [0, -2, 0]}},
         r"attention\.head_count_kv is \[0, -2, 0\], which"),
        ("granitemoehybrid", {"settings": {"granitehybrid.ssm.inner_size": 500}}, r"ssm\.inner_size is 500, which"),
        ("granitemoehybrid", {"settings": {"granitehybrid.ssm.state_size": 32}},
         r"ssm_conv1d\.weight has the shape .*; expected"),
        ("ministral3", {"settings": {"mistral3.rope.scaling.factor": 0.0}}, r"rope\.scaling\.factor is 0\.0, which"),
        ("gemma4", {"settings": {"gemma4.attention.sliding_window_pattern": 6}}, r"do not describe a gemma4 model"),
        ("gemma4", {"settings": {"gemma4.rope.scaling.type": "linear"}}, r"rope\.scaling\.type is 'linear', which"),
        ("ministral3", {"settings": {"mistral3.rope.scaling.type": None}}, r"rope\.scaling\.type is 'default', which"),
        ("ministral3", {"settings": {"mistral3.rope.freq_base": 1.0}}, r"not describe a mistral3 model: ZeroDivision"),
        ("phi3", {"settings": {"phi3.rope.scaling.type": "yarn"}}, r"rope\.scaling\.type is 'yarn', which"),
        ("phi3", {"without": "rope_factors_long.weight"}, r"does not have both rope_factors_long\.weight"),
        ("qwen3_5_moe_text", {"without": "blk.0.ffn_up_exps.weight"},
         r"has no tensor for model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ("phi3", {"settings": {"phi3.rope.dimension_count": 65}}, r"rope\.dimension_count is 65, which"),
        ("phi3", {"settings": {"phi3.rope.dimension_count": 32}},
         r"rope_factors_long\.weight has the shape \[24\]; expected \[16\]"),
    ],
)  # fmt: skip
def test_so_is_what_only_some_architectures_have(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(architecture), **changes)
    with pytest.raises(UnsupportedModel, match=message):
        checkpoint_of(path, cache)


def test_a_file_of_granite_4_without_mamba_layers_is_a_granite(tmp_path: Path, cache: Path) -> None:
    """llama.cpp's converter keeps the settings of the layers that the model does not have."""
    model = tiny_model("granite")
    settings = {
        "granite.ssm.conv_kernel": 4, "granite.ssm.inner_size": 512, "granite.expert_shared_feed_forward_length": 256,
        "granite.attention.head_count_kv": [model.config.num_key_value_heads] * model.config.num_hidden_layers,
    }  # fmt: skip
    made = read_gguf(write_gguf(tmp_path / "tiny.gguf", model, settings=settings), cache)
    assert torch.equal(made.model.layers[0].self_attn.k_proj.weight, model.model.layers[0].self_attn.k_proj.weight)


def test_a_file_of_mistral_small_is_a_mistral(tmp_path: Path, cache: Path) -> None:
    """llama.cpp has one name for Mistral Small 3.1, and for Ministral 3, which scales queries by their position."""
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny_model("ministral3"),
        settings={"mistral3.attention.temperature_scale": None, "mistral3.rope.scaling.type": None},
    )
    assert type(read_gguf(path, cache)).__name__ == "MistralForCausalLM"


def test_a_model_without_a_chat_template_is_known_as_one(demo_path: Path, tmp_path: Path, cache: Path) -> None:
    chats, other = (write_gguf(tmp_path / f"{name}.gguf", tiny_model(), settings=settings)
                    for name, settings in (("chats", {}), ("other", {"tokenizer.chat_template": None})))  # fmt: skip
    assert has_chat_template(str(chats))
    assert has_chat_template(str(demo_path))
    assert has_chat_template("some-org/some-model"), "nothing is known of it here"
    assert not has_chat_template(str(other))


@pytest.mark.parametrize("adds_space", [True, False])
def test_gemma_reads_texts_without_a_space_in_front(adds_space: bool, tmp_path: Path, cache: Path) -> None:
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "h",
        "e",
        "he",
        "▁he",
    ]
    settings = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": None,
        "tokenizer.ggml.scores": [-float(at) for at in range(len(tokens))],
        "tokenizer.ggml.token_type": [3] * 4 + [6] * 256 + [1] * 5, "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_space_prefix": adds_space,
    }  # fmt: skip
    path = write_gguf(tmp_path / "a.gguf", tiny_model("gemma3", vocab_size=len(tokens)), settings=settings)
    if adds_space:
        with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.add_space_prefix is true"):
            checkpoint_of(path, cache)
        return
    tokenizer = Tokenizer.load(str(checkpoint_of(path, cache)))
    assert tokenizer.encode("he he", add_special_tokens=True) == (2, tokens.index("he"), tokens.index("▁he"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"qwen35.attention.recurrent_layers": [True] * 4}}, r"recurrent_layers is \[True, True, True, T"),
        ({"settings": {"qwen35.attention.recurrent_layers": [True]}}, r"recurrent_layers is \[True\], which"),
        ({"settings": {"lfm2.rope.scaling.type": "yarn"}}, r"lfm2\.rope\.scaling\.type is 'yarn', which"),
        ({"settings": {"lfm2.expert_count": 8}}, r"lfm2\.expert_count is '?8'?, which cannot be read"),
        ({"settings": {"lfm2.block_count": 4_000_000_000}}, r"has fewer tensors than layers"),
        ({"settings": {"lfm2.attention.head_count_kv": 2}}, r"do not describe a lfm2 model: TypeError"),
        ({"settings": {"lfm2.shortconv.l_cache": None}}, r"do not describe a lfm2 model: KeyError"),
        ({"settings": {"lfm2.shortconv.other": 3}}, r"lfm2\.shortconv\.other is 3, which cannot be read"),
        ({"settings": {"lfm2.feed_forward_length": 128}},
         r"tensor blk\.0\.ffn_(gate|up|down)\.weight has the shape \[256, 256\].*; expected \[(128, 256|256, 128)\]"),
        ({"without": "blk.0.shortconv.in_proj.weight"}, r"has no tensor for model\.layers\.0\.conv\.in_proj\.weight"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}},
         r"tensor blk\.0\.ffn_gate_inp\.weight is not part of a lfm2 model"),
    ],
)  # fmt: skip
def test_what_the_tables_of_transformers_do_not_know_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, cache: Path
) -> None:
    architecture = "qwen3_5" if "qwen35" in str(changes) else "lfm2"
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(architecture), **changes)
    with pytest.raises(UnsupportedModel, match=message):
        checkpoint_of(path, cache)
