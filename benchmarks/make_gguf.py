r"""Make a GGUF file of a Llama in a folder, for comparisons with llama.cpp:

    python -m benchmarks.make_gguf --model DIR --out FILE-f16.gguf
    $LLAMA_ENV/bin/python -m benchmarks.make_gguf --quantise Q4_K_M --model FILE-f16.gguf --out FILE.gguf

The first command writes float16 with the tokenizer of the folder. The second command calls llama.cpp to quantise such a
file, and needs only llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import command_parser, tell

# Values of llama.cpp's `llama_ftype`.
_FTYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q4_K_S": 14,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_XS": 30,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("make_gguf", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR|FILE", help="a folder; with --quantise a GGUF file")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--quantise", choices=tuple(_FTYPES), help="quantise with llama.cpp")
    given = parser.parse_args(arguments)
    if given.quantise:
        quantise(Path(given.model), Path(given.out), _FTYPES[given.quantise])
    else:
        write_gguf(Path(given.model), Path(given.out))
    tell(f"{given.out}: {Path(given.out).stat().st_size / 1e6:,.0f} MB")
    return 0


def write_gguf(folder: Path, path: Path) -> None:
    """Write the Llama of a folder in float16, with its norms in float32."""
    import numpy as np
    from gguf import GGUFWriter, get_tensor_name_map
    from gguf.constants import MODEL_ARCH
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise SystemExit(f"{folder} has a model of type {config['model_type']}; only a llama is written")
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = GGUFWriter(path, "llama")
    _describe(writer, config, json.loads((folder / "tokenizer.json").read_text()))
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                weight = opened.get_tensor(name).float().numpy()
                for end, count in heads.items():
                    if name.endswith(end):  # llama.cpp rotates neighbours
                        weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
                matrix = 2
                kind: Any = np.float16 if weight.ndim == matrix else np.float32
                writer.add_tensor(
                    names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(weight.astype(kind))
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = tokenizer["model"]["vocab"] | {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in vocabulary.items()}
    normal, control = 1, 3
    special = {each["id"] for each in tokenizer["added_tokens"] if each["special"]}
    count = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(number, f"<unused{number}>") for number in range(count)])
    writer.add_token_types([control if number in special else normal for number in range(count)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])


def quantise(source: Path, target: Path, ftype: int) -> None:
    """Quantise a file with llama.cpp. Raises SystemExit if llama.cpp fails."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = ftype
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if status != 0:
        raise SystemExit(f"llama_model_quantize returned {status}")


if __name__ == "__main__":
    sys.exit(main())
