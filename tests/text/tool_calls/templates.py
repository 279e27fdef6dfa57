"""Chat templates that write tool calls as the known families of models do, and tokenizers that have them."""

from __future__ import annotations

from collections.abc import Sequence

from app.text import Tokenizer
from tests.text.small_tokenizers import build_byte_level

HERMES = """
{%- if tools %}<|system|>Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

LLAMA3 = """
{%- if tools %}<|system|>Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}<|assistant|>
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}}<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have 9 characters") }}{% endif %}
{{- ", " if not loop.first else "" }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- endfor %}]</s>
{%- else %} {{ message.content }}</s>{% endif %}{% endfor %}"""  # noqa: E501 (one line of a template)

# Arguments as the text that they are: objects make it fail.
TEXT_ARGUMENTS = """
{%- for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + ": " + call.function.arguments }}{% endfor %}
{%- endfor %}"""

XML = """
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call><function={{ call.function.name }}></function></tool_call>
{%- endfor %}{% endfor %}"""

TEMPLATES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>", "[ARGS]")


def tokenizer_with(template: str, special: Sequence[str] = SPECIAL) -> Tokenizer:
    return build_byte_level(template, special)
