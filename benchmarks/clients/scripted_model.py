"""A model for coding agents that calls their shell and reports the result of the call.

No model that is small enough to be bundled uses tools by itself. The weights here are made by hand: every token has a
fixed next token, and the chat template chooses the first token by the content of the conversation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.clients.told import ANSWER, COMMAND, RESULT
from benchmarks.harness.machine import PROJECT

_ARGUMENTS = {"Bash": {"command": COMMAND, "description": "Count"}, "exec_command": {"cmd": COMMAND}}
_CALLS = {
    name: f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    for name, arguments in _ARGUMENTS.items()
}
_BEGIN, _END = "<|begin:{}|>", "<|end|>"
_CONTEXT = 131_072
_TEMPLATE = (
    """{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}<|{{ 'system' if message.role == 'tool' else message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- set told = messages | map(attribute='content') | join %}"""
    + "{% if '"
    + RESULT
    + "' in told %}<|begin:answer|>"
    + "".join("{% elif '" + name + "' in names %}" + _BEGIN.format(name) for name in _CALLS)
    + "{% else %}<|begin:answer|>{% endif %}{% endif %}"
)


@contextmanager
def scripted_model() -> Iterator[Path]:
    """Yield the model's folder, which exists until the end of the block."""
    scripts = [[_BEGIN.format(name), call, _END] for name, call in _CALLS.items()]
    scripts.append([_BEGIN.format("answer"), ANSWER, _END])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(PROJECT / "models" / "demo")
    spoken = [text for script in scripts for text in script if text != _END]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=text.startswith("<|")) for text in spoken])
    tokenizer.chat_template, tokenizer.model_max_length = _TEMPLATE, _CONTEXT
    with tempfile.TemporaryDirectory(prefix="carousel-scripted-") as folder:
        tokenizer.save_pretrained(folder)
        _weights([[tokenizer.convert_tokens_to_ids(text) for text in script] for script in scripts]).save_pretrained(
            folder
        )
        yield Path(folder)


def _weights(scripts: list[list[int]]) -> LlamaForCausalLM:
    """Return a Llama that writes each script to its end. The only layer adds nothing to a token's embedding."""
    end = scripts[0][-1]
    config = LlamaConfig(
        vocab_size=1 + max(token for script in scripts for token in script), hidden_size=64, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        max_position_embeddings=_CONTEXT, tie_word_embeddings=False, eos_token_id=end, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer, embedded, logits = model.model.layers[0], model.model.embed_tokens.weight, model.lm_head.weight
        for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, embedded, logits):
            matrix.zero_()
        followed = [pair for script in scripts for pair in pairwise(script)]
        for place, (token, following) in enumerate(followed):
            embedded[token, place] = 1
            logits[following, place] = 100
    return model
