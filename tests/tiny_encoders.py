"""Tiny random encoders and cross-encoders, with a tokenizer that puts tokens around pairs of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    ElectraConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

VOCAB_SIZE = 97
NUM_POSITIONS = 80
PADDING = 3  # RoBERTa's positions begin behind it
CLS, SEP = 1, 2
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": NUM_POSITIONS,
    "initializer_range": 0.3,
    "pad_token_id": PADDING,
}


def _configs() -> dict[str, PreTrainedConfig]:
    distil = {"vocab_size": VOCAB_SIZE, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    return {
        "bert": BertConfig(**_SHAPE, type_vocab_size=2),
        "roberta": RobertaConfig(**_SHAPE, type_vocab_size=1),
        "xlm_roberta": XLMRobertaConfig(**_SHAPE, type_vocab_size=1),
        "distilbert": DistilBertConfig(
            **distil, max_position_embeddings=NUM_POSITIONS, initializer_range=0.3, pad_token_id=PADDING
        ),
        "electra": ElectraConfig(**_SHAPE, type_vocab_size=2, embedding_size=32),
        "llama": LlamaConfig(**_SHAPE, num_key_value_heads=2),
        "qwen3": Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=8),
        "mistral": MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=9),
    }


ENCODERS = ("bert", "roberta", "xlm_roberta", "distilbert")
CROSS_ENCODERS = (*ENCODERS, "electra", "llama", "qwen3")


def save_tiny_encoder(kind: str, folder: Path, *, num_labels: int = 0, **changes: Any) -> PreTrainedModel:
    """A model with its tokenizer in a folder. num_labels: 0 for one without a head. changes: of the configuration."""
    configs = _configs()
    torch.manual_seed(list(configs).index(kind))
    config = configs[kind]
    for name, value in changes.items():
        setattr(config, name, value)
    model: PreTrainedModel
    if num_labels:
        config.num_labels = num_labels
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    else:
        model = AutoModel.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder)
    tiny_tokenizer(is_roberta="roberta" in kind).save_pretrained(folder)
    return model.eval()


def tiny_tokenizer(*, is_roberta: bool = False) -> PreTrainedTokenizerFast:
    """Words `w4` … `w96` have these ids."""
    words = {"[UNK]": 0, "[CLS]": CLS, "[SEP]": SEP, "[PAD]": PADDING}
    backend = Tokenizer(models.WordLevel(words | {f"w{id}": id for id in range(4, VOCAB_SIZE)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    processor = processors.RobertaProcessing if is_roberta else processors.BertProcessing
    backend.post_processor = processor(("[SEP]", SEP), ("[CLS]", CLS))
    names = ["input_ids", "attention_mask"] if is_roberta else ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        model_input_names=names,
    )


def write_pooling(folder: Path, *modes: str, max_length: int | None = None, module: str = "Normalize") -> None:
    """The files of sentence-transformers that say how a text becomes a vector."""
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    modules += [{"idx": 2, "path": "2_More", "type": f"sentence_transformers.models.{module}"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 32} | {f"pooling_mode_{mode}": True for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
