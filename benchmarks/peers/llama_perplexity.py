r"""Test if llama.cpp finds the same tokens likely with the same GGUF file, on texts of this project's pages.

    python -m benchmarks.peers.llama_perplexity --model FILE.gguf --llama $LLAMA_ENV/bin/python [--plain]

llama.cpp cuts each text into tokens and computes `--tokens` of them; this engine computes the same tokens. Prints both
perplexities, and the share of places at which both find the same token likeliest. `--steps`: llama.cpp also computes
one token at a time and is compared with itself. `--plain`: with transformers' code in float32, which rounds no inputs.
The environment of `--llama` needs llama-cpp-python and numpy. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.machine import PROJECT

_CHARACTERS = 24  # of a text for each token: more than any token has


class Read(NamedTuple):
    """A model's results for the tokens of one text."""

    token_ids: list[int]
    losses: list[float]  # of each token but the first: its negative log-likelihood, given the tokens before
    likeliest: list[int]  # the likeliest token at each place


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    if given.read:
        _read_by_llama(given)
        raise SystemExit(0)
    theirs = _by_llama(given)
    tell(f"llama.cpp has read {len(theirs)} texts")
    ours = _ours(given, [text.token_ids for text in theirs])
    figures = {"llama.cpp": _perplexity(theirs), **_compared("carousel", ours, theirs)}
    if given.steps:
        figures |= _compared("llama.cpp, one token at a time", _by_llama(given, "--one-by-one"), theirs)
    for name, value in figures.items():
        tell(f"{name}: {value:.6g}")
    return figures


def _compared(name: str, others: Sequence[Read], theirs: Sequence[Read]) -> dict[str, float]:
    same = [a == b for x, y in zip(others, theirs, strict=True) for a, b in zip(x.likeliest, y.likeliest, strict=True)]
    return {name: _perplexity(others), f"{name}, same likeliest token": sum(same) / len(same)}


def _perplexity(texts: Sequence[Read]) -> float:
    losses = [loss for text in texts for loss in text.losses]
    return math.exp(sum(losses) / len(losses))


def _texts(given: argparse.Namespace) -> list[str]:
    """Return pieces of the pages at equal distances."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((PROJECT / "docs").rglob("*.md")))
    apart = len(pages) // given.texts
    return [pages[at * apart :][: given.tokens * _CHARACTERS] for at in range(given.texts)]


def _by_llama(given: argparse.Namespace, *more: str) -> list[Read]:
    module = "benchmarks.peers.llama_perplexity"
    command = [given.llama, "-m", module, "--model", given.model, "--tokens", str(given.tokens), "--read", *more]
    asked = json.dumps(_texts(given))
    done = subprocess.run(
        command,
        input=asked,
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    if done.returncode:
        raise BenchmarkError(f"{given.llama} ended with status {done.returncode}: {done.stderr[-500:]}")
    return [Read(*text) for text in json.loads(done.stdout.splitlines()[-1])]


def _read_by_llama(given: argparse.Namespace) -> None:
    """Read texts from stdin and print the results of llama.cpp, in llama.cpp's environment."""
    import llama_cpp
    import numpy as np

    room = -(-given.tokens // 64) * 64
    model = llama_cpp.Llama(given.model, n_ctx=room, n_batch=room, n_threads=2, logits_all=True, verbose=False)
    begins = model.metadata.get("tokenizer.ggml.add_bos_token") == "true"
    found = []
    for text in json.load(sys.stdin):
        ids = model.tokenize(text.encode(), add_bos=begins)[: given.tokens + 1]
        if len(ids) <= given.tokens:
            raise SystemExit(f"a text has {len(ids)} tokens: lower --tokens or --texts")
        computed = ids[: given.tokens]
        model.reset()
        for piece in [[token] for token in computed] if given.one_by_one else [computed]:
            model.eval(piece)
        logits = np.array(model.scores[: given.tokens], dtype=np.float64)
        most = logits.max(-1)
        sums = np.log(np.exp(logits - most[:, None]).sum(-1)) + most
        losses = sums - logits[np.arange(given.tokens), ids[1:]]
        found.append(Read(ids, losses.tolist(), logits.argmax(-1).tolist()))
    print(json.dumps(found))


def _ours(given: argparse.Namespace, texts: Sequence[list[int]]) -> list[Read]:
    from app.build import build_sync_engine
    from app.config import CacheConfig, EngineConfig, ModelConfig
    from app.engine.request import MergedDelta, Request, SamplingParams, TokenDelta

    backend = "torch" if given.plain else "auto"
    model = ModelConfig(path=given.model, device="cpu", dtype="float32", num_threads=2, backend=backend)
    engine = build_sync_engine(EngineConfig(model=model, cache=CacheConfig(memory_gib=0.5)))
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=1)
    deltas: dict[str, list[TokenDelta]] = {str(at): [] for at in range(len(texts))}
    for name, ids in zip(deltas, texts, strict=True):
        engine.add(Request(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    scores = [MergedDelta(*each).delta().prompt_logprobs for each in deltas.values()]
    return [
        Read(ids, [-each.logprob for each in own], [each.top_token_ids[0] for each in own])
        for ids, own in zip(texts, scores, strict=True)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("peers.llama_perplexity", __doc__)
    parser.add_argument("--model", required=True, metavar="FILE.gguf")
    parser.add_argument("--llama", default="python", metavar="PYTHON", help="of an environment with llama-cpp-python")
    parser.add_argument("--texts", type=positive, default=20, metavar="N", help="pieces of this project's pages (20)")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="tokens of each piece (64)")
    parser.add_argument("--steps", action="store_true", help="also compare llama.cpp with itself, one token at a time")
    parser.add_argument("--plain", action="store_true", help="use transformers' code in float32 instead of the decoder")
    parser.add_argument("--read", action="store_true", help="internal: run in the environment of --llama")
    parser.add_argument("--one-by-one", action="store_true", help="with --read: compute one token at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
