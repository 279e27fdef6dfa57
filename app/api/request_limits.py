"""What one request may ask for and how long it may take: constants, because no deployment needs others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of the HTTP API for one request. A key has its own beside them (`api.keys`)."""

    max_body_bytes: int = 8 * 1024 * 1024  # some two million tokens of text: more than a context holds
    body_timeout_s: float = 60.0  # for the whole body; a slower one is no honest client
    max_choices: int = 16  # highest `n` and `best_of`
    max_prompts: int = 128  # prompts × n in one call that waits for its response
    max_inputs: int = 2048  # texts in one embeddings call, as OpenAI has it; `max_prompts` of them computed at once
    max_logprobs: int = 20  # highest `top_logprobs`, `logprobs` and `prompt_logprobs`, as OpenAI has it
    max_stop_strings: int = 4  # entries of `stop`, as OpenAI has it
    max_stop_length: int = 256  # characters of one stop string: so much of the text is held back
    heartbeat_s: float = 15.0  # silence on a stream after which a comment is sent: proxies close at 30 to 60 s
