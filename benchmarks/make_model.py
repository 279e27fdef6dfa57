"""Make a random Llama of a known shape, with a tokenizer: `python -m benchmarks.make_model --shape 135m --out DIR`.

The same shape, seed and torch version give the same weights. The values of the weights do not change the speed. With
the default spread, a random model repeats its last token for ever: use `--init-range 0.1` if tokens are compared.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness.command import command_parser, tell

CONTEXT_LENGTH = 8192
END, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_TOKENIZER_SIZE = 16384  # the text of the standard library has sensible merges up to this size
CHAT_TEMPLATE = (
    f"{{% for message in messages %}}{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content']"
    f" + '{TURN_END}\\n' }}}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN_START}assistant\\n' }}}}{{% endif %}}"
)


Shape = Mapping[str, int]  # the sizes of a Llama, by transformers' names
SHAPES: dict[str, Shape] = {
    # SmolLM2-135M
    "135m": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152,
    },
    # Llama 3.2 1B; making this model takes 8 GB of memory
    "1b": {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256,
    },
    "25m": {
        "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
        "intermediate_size": 1024, "vocab_size": 8192,
    },
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("make_model", __doc__)
    parser.add_argument("--shape", required=True, choices=tuple(SHAPES))
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init-range", type=float, default=0.02, metavar="SPREAD", help="spread of the random weights")
    given = parser.parse_args(arguments)
    make_model(SHAPES[given.shape], given.out, seed=given.seed, init_range=given.init_range, texts=standard_library())
    return 0


def make_model(shape: Shape, folder: str, *, seed: int, init_range: float, texts: Sequence[Path]) -> None:
    """Write a model folder in bfloat16: weights, configuration, and a tokenizer trained on the texts."""
    tokenizer = train_tokenizer(texts, min(shape["vocab_size"], MAX_TOKENIZER_SIZE))
    model = random_llama(shape, seed=seed, init_range=init_range)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    tell(f"{folder}: {num_weights / 1e6:.1f} million weights, {len(tokenizer):,} tokens")


def random_llama(shape: Shape, *, seed: int, init_range: float) -> LlamaForCausalLM:
    config = LlamaConfig(
        **shape,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        initializer_range=init_range,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.rope_theta = 100_000.0  # the older name of the setting, for readers that know only this name
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def train_tokenizer(texts: Sequence[Path], size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, which encodes any text. The vocabulary may be smaller than `size` for short texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in texts], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, unk_token=END,
        model_max_length=CONTEXT_LENGTH,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def standard_library() -> list[Path]:
    """Return the paths of text that every machine with Python has."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
