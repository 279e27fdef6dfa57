"""How fast an encoder embeds texts of mixed lengths, against transformers with padding.

    python -m benchmarks.engine.encoder [--shape minilm] [--texts 256] [--shortest 8] [--longest 256]

Random weights in a known shape, in float32. Three ways take turns in one process, on the same texts: our engine in its
steps, and transformers (SDPA) in batches of 32 with padding, as the texts come and sorted by length, as
sentence-transformers does where it has all texts at once. Each round is one pass over all texts; medians. Tokens are
those of the texts; tokens of padding do not count. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, BertConfig, BertModel, PreTrainedModel

from app.assembly import build_sync_engine
from app.config import EngineConfig, ModelConfig
from app.engine.engine import Engine
from app.engine.request import Pooling, Request, SamplingParams
from benchmarks.harness.command import command_parser, positive, run_command, tell

BATCH_SIZE = 32
VOCAB_SIZE = 30_522
_SHAPES = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}

Texts = list[tuple[int, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(given.seed)
    lengths = [rng.randint(given.shortest, given.longest) for _ in range(given.texts)]
    texts = [tuple(rng.randrange(1000, VOCAB_SIZE) for _ in range(length)) for length in lengths]
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="carousel-encoder-") as folder:
        _random_model(given.shape, Path(folder))
        engine = _engine(folder, given.threads)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    in_order = sorted(texts, key=len)
    ways: dict[str, Callable[[], list[list[float]]]] = {
        "carousel": lambda: _embedded(engine, texts),
        "padded": lambda: _padded(model, texts),
        "sorted": lambda: _padded(model, in_order),
    }
    difference = _largest_difference(ways["carousel"](), ways["padded"]())
    ways["sorted"]()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
        tell(f"round {number + 1}: " + ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items()))
    num_tokens = sum(lengths)
    rates = {f"{name}_tokens_per_s": round(num_tokens / statistics.median(times)) for name, times in seconds.items()}
    ratios = {f"against_{other}": _ratio(seconds[other], seconds["carousel"]) for other in ("padded", "sorted")}
    padding = {f"padding_{name}": _padding(each) for name, each in (("padded", texts), ("sorted", in_order))}
    return {"shape": given.shape, "num_tokens": num_tokens, "largest_difference": difference} | rates | ratios | padding


def _ratio(theirs: list[float], ours: list[float]) -> float:
    """The median over the rounds."""
    return round(statistics.median(one / other for one, other in zip(theirs, ours, strict=True)), 2)


def _random_model(shape: str, folder: Path) -> None:
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=VOCAB_SIZE, **_SHAPES[shape])).save_pretrained(folder)


def _engine(folder: str, num_threads: int) -> Engine:
    model = ModelConfig(path=folder, device="cpu", dtype="float32", num_threads=num_threads)
    return build_sync_engine(EngineConfig(model=model))


def _embedded(engine: Engine, texts: Texts) -> list[list[float]]:
    """All texts at once, as requests of the engine."""
    for number, text in enumerate(texts):
        request = Request(
            request_id=str(number), prompt_token_ids=text, sampling=SamplingParams(max_tokens=0), pooling=Pooling.MEAN
        )
        engine.add(request)
    vectors: list[list[float]] = [[]] * len(texts)
    while engine.has_work:
        for delta in engine.step():
            if delta.embedding is not None:
                vectors[int(delta.request_id)] = array("f", delta.embedding).tolist()
    return vectors


@torch.inference_mode()
def _padded(model: PreTrainedModel, texts: Texts) -> list[list[float]]:
    vectors: list[list[float]] = []
    for batch in _batches(texts):
        longest = max(map(len, batch))
        token_ids = torch.tensor([text + (0,) * (longest - len(text)) for text in batch])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in batch])
        states = model(input_ids=token_ids, attention_mask=mask).last_hidden_state
        sums = (states * mask[..., None]).sum(dim=1)
        vectors += (sums / mask.sum(dim=1, keepdim=True)).tolist()
    return vectors


def _batches(texts: Texts) -> list[Texts]:
    return [texts[at : at + BATCH_SIZE] for at in range(0, len(texts), BATCH_SIZE)]


def _padding(texts: Texts) -> float:
    """The part of all computed tokens that is padding."""
    computed = sum(len(batch) * max(map(len, batch)) for batch in _batches(texts))
    return round(1 - sum(map(len, texts)) / computed, 3)


def _largest_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Of any vector, relative to its length."""
    mine, other = torch.tensor(ours), torch.tensor(theirs)
    return float(((mine - other).norm(dim=1) / other.norm(dim=1)).max())


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("engine.encoder", __doc__)
    parser.add_argument("--shape", choices=list(_SHAPES), default="minilm", help="of the random model")
    parser.add_argument("--texts", type=positive, default=256, metavar="N")
    parser.add_argument("--shortest", type=positive, default=8, metavar="TOKENS")
    parser.add_argument("--longest", type=positive, default=256, metavar="TOKENS", help="lengths are uniform between")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--threads", type=positive, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    return parser


if __name__ == "__main__":
    sys.exit(main())
