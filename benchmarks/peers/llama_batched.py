r"""Measure llama.cpp through the library of llama-cpp-python, and print the figures like `llama-batched-bench`.

    $LLAMA_ENV/bin/python -m benchmarks.peers.llama_batched -m FILE.gguf -t 2 -tb 2 -b 2048 -c 768 -npp 128 \
        -ntg 64 -npl 4

Computes `-npl` prompts of `-npp` random tokens each, and then `-ntg` steps in which each sequence takes its most likely
token. (`llama-batched-bench` draws no tokens.) The environment needs llama-cpp-python and numpy.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

_FIRST_TOKEN, _LAST_TOKEN = 300, 16_000  # excludes special tokens

# A token, its position, its sequence, and whether its logits are wanted.
_Item = tuple[int, int, int, bool]


class Context:
    """A model with room for some sequences, which step together."""

    def __init__(self, given: argparse.Namespace) -> None:
        import llama_cpp
        import numpy as np

        self._llama: Any = llama_cpp
        self._numpy: Any = np
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(given.model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"{given.model} cannot be loaded")
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        wanted = llama_cpp.llama_context_default_params()
        each = -(-given.context // given.sequences // 256) * 256  # llama.cpp rounds the length of a sequence to 256
        wanted.n_ctx, wanted.n_seq_max = each * given.sequences, given.sequences
        wanted.n_batch = wanted.n_ubatch = self._most = given.batch
        wanted.n_threads, wanted.n_threads_batch = given.threads, given.batch_threads
        self._context = llama_cpp.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise SystemExit(f"no context of {wanted.n_ctx} tokens for {given.sequences} sequences")
        self._batch = llama_cpp.llama_batch_init(self._most, 0, 1)

    def compute(self, items: Sequence[_Item]) -> list[int]:
        """Return the most likely tokens after the items whose logits are wanted."""
        found: list[int] = []
        for first in range(0, len(items), self._most):
            found += self._compute(items[first : first + self._most])
        return found

    def _compute(self, items: Sequence[_Item]) -> list[int]:
        batch = self._batch
        batch.n_tokens = len(items)
        for at, (token, position, sequence, is_wanted) in enumerate(items):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, is_wanted
        status = self._llama.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        return [self._argmax(at) for at, item in enumerate(items) if item[3]]

    def _argmax(self, at: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, at)
        return int(self._numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.llama_batched",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", dest="model", required=True)
    for option, name in (
        ("-t", "threads"), ("-tb", "batch_threads"), ("-b", "batch"), ("-c", "context"), ("-npp", "prompt"),
        ("-ntg", "output"), ("-npl", "sequences"), ("-ngl", "gpu_layers"),
    ):  # fmt: skip
        parser.add_argument(option, dest=name, type=int, default=0)
    parser.add_argument("--output-format", choices=("jsonl",))
    given = parser.parse_args(arguments)
    context, source = Context(given), random.Random(0)
    last = min(_LAST_TOKEN, context.vocab_size)
    prompts = [[source.randrange(_FIRST_TOKEN, last) for _ in range(given.prompt)] for _ in range(given.sequences)]
    begin = time.perf_counter()
    tokens = context.compute(
        [
            (token, at, sequence, at == given.prompt - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
    )
    behind_prompts = time.perf_counter()
    for step in range(given.output):
        tokens = context.compute(
            [(token, given.prompt + step, sequence, True) for sequence, token in enumerate(tokens)]
        )
    end = time.perf_counter()
    print(json.dumps({"t_pp": behind_prompts - begin, "t_tg": end - behind_prompts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
