"""Several decoders in threads of one process, which exchange numbers as ranks in processes of their own do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.model.cpu.checkpoint import Checkpoint
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import Team
from app.model.cpu.ranks import RankMemory, RankMissing
from app.model.cpu.weights import pack_weights
from app.model.forward import Prediction
from app.model.inputs import ModelInputs, Segments, build_inputs
from app.model.kv_cache import LayerShape
from app.model.loader import LoadedModel
from app.model.parallel.slices import part_of, settings_of_rank
from tests.model.cpu.test_decoder import BLOCKS, DTYPES, PROMPT, chunk, decoder_of, load, step
from tests.model.test_attention import poison
from tests.tiny_models import build_tiny_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"]
# Groups of quantised weights divide among two ranks.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_UNITS = {0: 16, 8: 64, 4: 32}  # inputs that stay together, by the bits of weights


class Ranks:
    """The decoders of all ranks of a model."""

    def __init__(
        self, path: Path, whole: LoadedModel, size: int, *, in_int8: bool = False, timeout_s: float = 60.0
    ) -> None:
        """in_int8: the KV memory."""
        assert whole.native is not None
        settings, bits = whole.native.settings, whole.native.weight_bits
        self.memory = torch.zeros(0)
        self.decoders: list[NativeDecoder] = []
        self.views: list[RankMemory] = []
        for rank in range(size):
            own = settings_of_rank(settings, rank=rank, size=size, unit=_UNITS[bits])
            if rank == 0:
                self.memory = torch.zeros(RankMemory.num_bytes(own), dtype=torch.uint8)
            checkpoint = Checkpoint(path, whole.dtype, part=lambda *weight, own=own: part_of(own, *weight))
            shape = LayerShape(num_kv_heads=own.num_kv_heads, key_dim=own.head_dim, value_dim=own.head_dim)
            pages = NativeKVCache(
                dict.fromkeys(whole.layers, shape), num_blocks=32, block_size=16, dtype=whole.dtype, in_int8=in_int8
            )
            poison(pages)
            weights = pack_weights(checkpoint, own, bits=bits, release=checkpoint.release)
            self.views.append(RankMemory(own, self.memory, timeout_s=timeout_s))
            self.decoders.append(NativeDecoder(weights, pages, Team(1 + rank % 2), memory=self.views[-1]))

    def all(self, compute: Callable[[NativeDecoder], Prediction]) -> Prediction:
        """What rank 0 has."""

        def computed(decoder: NativeDecoder) -> Prediction:
            with torch.inference_mode():  # it holds for one thread
                return compute(decoder)

        with ThreadPoolExecutor(len(self.decoders)) as pool:
            first, *others = pool.map(computed, self.decoders)
        assert all(other.logits.shape[0] == 0 for other in others)
        return first

    def step(self, *items: ScheduledSequence) -> torch.Tensor:
        batch = StepBatch(items, ())
        inputs = build_inputs(batch, block_size=16, device=torch.device("cpu"))
        prediction = self.all(lambda decoder: decoder.predict(batch, inputs))
        assert prediction.likeliest is not None
        assert torch.equal(prediction.likeliest, prediction.logits.argmax(dim=-1))
        return prediction.logits


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("ranks")

    def path(architecture: str, **changes: object) -> Path:
        if architecture == "qwen3_moe":
            changes["moe_intermediate_size"] = 64  # 48 is no multiple of 4 x 16
        folder = root / f"{architecture}-{len(changes)}"
        if not folder.exists():
            build_tiny_model(architecture, **changes).save_pretrained(folder)
        return folder

    return path


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_ranks_together_have_the_logits_of_one_decoder(
    architecture: str, dtype: str, size: int, path_of: Callable[..., Path]
) -> None:
    """Of four ranks, two have the same of two KV heads."""
    path = path_of(architecture)
    whole = load(path, dtype)
    expected = step(decoder_of(whole), chunk(PROMPT, 0, 70, BLOCKS))
    got = Ranks(path, whole, size).step(chunk(PROMPT, 0, 70, BLOCKS))
    limit = 2e-5 if dtype == "float32" else 0.06 * float(expected.abs().max())
    assert float((got - expected).abs().max()) <= limit
    assert torch.equal(got.argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("is_tied", [False, True])
@torch.inference_mode()
def test_quantised_ranks_have_the_logits_of_one_quantised_decoder(
    quantization: str, is_tied: bool, path_of: Callable[..., Path], tmp_path: Path
) -> None:
    """A group of weights lies on one rank, so all are rounded to the same. A tied embedding is read from the head."""
    build_tiny_model("llama", **WIDE, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    whole = load(tmp_path, "bfloat16", quantization=quantization)
    assert whole.native is not None
    assert (whole.native.embedding is None) == is_tied
    expected = step(decoder_of(whole), chunk(PROMPT, 0, 70, BLOCKS))
    got = Ranks(tmp_path, whole, 2).step(chunk(PROMPT, 0, 70, BLOCKS))
    assert float((got - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_a_sequences_logits_do_not_depend_on_what_shares_its_steps(
    architecture: str, dtype: str, path_of: Callable[..., Path]
) -> None:
    path = path_of(architecture)
    whole = load(path, dtype)
    expected = Ranks(path, whole, 2, in_int8=True).step(chunk(PROMPT, 0, 70, BLOCKS))[0]
    crowded, backwards = Ranks(path, whole, 2, in_int8=True), PROMPT[::-1]
    for start, size in ((0, 33), (33, 5), (38, 31), (69, 1)):
        beside = chunk(backwards, start, 1, [2, 7, 4, 5, 6])
        rows = crowded.step(beside, chunk(PROMPT, start, size, BLOCKS), chunk(backwards, 0, 40, [10, 11, 12]))
    assert torch.equal(rows[1], expected)


@torch.inference_mode()
def test_more_rows_than_are_exchanged_at_a_time_have_their_logits(path_of: Callable[..., Path]) -> None:
    path, num_tokens = path_of("llama"), 250
    whole = load(path, "float32")
    places = torch.arange(num_tokens)
    inputs = ModelInputs(
        token_ids=(places * 7 % 211)[None], positions=places[None], slots=places, logits_indices=places
    )
    blocks = torch.arange(16, dtype=torch.int32)
    segments = Segments(torch.tensor([[0, num_tokens, 0, 0]], dtype=torch.int32), blocks, num_tokens)
    expected = decoder_of(whole).compute(inputs, segments)
    got = Ranks(path, whole, 2).all(lambda decoder: decoder.compute(inputs, segments))
    assert float((got.logits - expected.logits).abs().max()) < 2e-5
    assert got.likeliest is not None
    assert expected.likeliest is not None
    assert torch.equal(got.likeliest, expected.likeliest)


@torch.inference_mode()
def test_a_rank_that_does_not_come_is_named_within_the_timeout(path_of: Callable[..., Path]) -> None:
    path = path_of("llama")
    whole = load(path, "float32")
    alone = Ranks(path, whole, 4, timeout_s=0.05)
    alone.decoders = [alone.decoders[0]]
    for _ in range(2):  # and the group is of no use from then on
        with pytest.raises(RankMissing, match="rank 1 did not come"):
            alone.step(chunk(PROMPT, 0, 20, BLOCKS))


@torch.inference_mode()
def test_an_aborted_rank_waits_no_longer(path_of: Callable[..., Path]) -> None:
    path = path_of("llama")
    alone = Ranks(path, load(path, "float32"), 2)
    alone.decoders = [alone.decoders[0]]
    timer = threading.Timer(0.2, alone.views[0].abort)
    timer.start()
    with pytest.raises(RankMissing, match="rank 1 did not come"):
        alone.step(chunk(PROMPT, 0, 20, BLOCKS))
    timer.join()


@torch.inference_mode()
def test_a_step_may_sample_nothing(path_of: Callable[..., Path]) -> None:
    path = path_of("llama")
    whole = load(path, "float32")
    assert Ranks(path, whole, 2).step(chunk(PROMPT, 0, 20, BLOCKS, samples=False)).shape[0] == 0
