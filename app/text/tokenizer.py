"""A model's tokenizer: encoding, chat template, decoding. Does not import torch.

`AutoTokenizer` would import torch, which an ingress does not need. Every current model provides a `tokenizer.json`,
which can be loaded without torch. transformers is imported when a tokenizer is loaded, because the import takes 0.7 s
and the process that builds the application needs no tokenizer.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import ContextTooLong, InvalidRequest, InvalidSetup
from app.text.chat_messages import TemplateTraits, adapted, call_marks_of, in_parts, joined_turns
from app.text.text_pairs import CHARACTERS_AT_ONCE, EncodedTexts, Forms
from app.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """A model's tokenizer. Thread-safe, because the same input always produces the same result."""

    def __init__(self, pretrained: PreTrainedTokenizerFast) -> None:
        self._pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        of_special = [str(token.content) for token in added.values() if token.special]
        is_exact = not any(token.special and token.normalized for token in added.values())
        # Finds special tokens in a text. None if the tokenizer normalizes texts before searching them for tokens.
        self._special_text = re.compile("|".join(map(re.escape, of_special)) or "(?!)") if is_exact else None
        self._token_texts: dict[int, str] = {}
        self.token_bytes = TokenBytes(self._backend)
        # The model's own tokenizer class, which may have other defaults, is not loaded.
        names = pretrained.init_kwargs.get("model_input_names") or ["token_type_ids"]
        self._forms = Forms(self._backend, has_types="token_type_ids" in names)

    @classmethod
    def load(cls, path: str, revision: str | None = None) -> Tokenizer:
        """Load a tokenizer from a folder or hub id, without running code from it. Raises InvalidSetup if this fails."""
        from transformers import PreTrainedTokenizerFast

        try:
            pretrained = PreTrainedTokenizerFast.from_pretrained(path, revision=revision, trust_remote_code=False)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidSetup(
                f"the tokenizer could not be loaded from {path!r} ({_brief(error)}); "
                f"the model's folder must contain a tokenizer.json, as written by tokenizer.save_pretrained"
            ) from error
        if not pretrained.chat_template:
            pretrained.chat_template = _template_of_processor(path, revision)
        return cls(pretrained)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._pretrained.chat_template)

    @property
    def has_tools_in_template(self) -> bool:
        """Whether the chat template writes tools into the prompt."""
        return re.search(r"\btools\b", str(self._pretrained.chat_template)) is not None

    def has_in_template(self, text: str) -> bool:
        return text in str(self._pretrained.chat_template or "")

    def special_ids(self, texts: Collection[str]) -> frozenset[int]:
        """Return the ids of those texts that are special tokens."""
        return frozenset(
            token_id for token_id in self.special_token_ids if self._backend.id_to_token(token_id) in texts
        )

    @cached_property
    def added_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of the special tokens that `add_special_tokens` adds, as (before a text, after a text)."""
        [encoding] = self._backend.encode_batch_fast(["a"], add_special_tokens=True)
        at = [index for index, text in enumerate(encoding.sequence_ids) if text is not None]
        return (tuple(encoding.ids[: at[0]]), tuple(encoding.ids[at[-1] + 1 :])) if at else ((), ())

    def special_tokens_in(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens that occur in these texts. Maps ids to texts."""
        if self._special_text is not None and not any(map(self._special_text.search, texts)):
            return {}  # the usual case, without encoding, which is slow
        found = {token_id for token_ids in self.encode_all(texts) for token_id in token_ids}
        return {token_id: self.token_text(token_id) for token_id in sorted(found & self.special_token_ids)}

    def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None) -> tuple[int, ...]:
        """Return a text's token ids, including the model's begin and end tokens if `add_special_tokens` is set.

        Raises ContextTooLong if the text exceeds `max_tokens`, because listing millions of ids would block all threads.
        """
        # The batch call is used because it releases the interpreter lock, unlike the call for a single text.
        try:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # not valid Unicode, because a chat template has decoded an escape in a call's arguments
            raise InvalidRequest(
                r"the messages contain half of a surrogate pair, such as \ud800, which is not a character; remove such "
                "escapes from the arguments of tool calls",
                param="messages",
            ) from None
        if max_tokens is not None and len(encoding) > max_tokens:
            raise ContextTooLong(f"a text has {len(encoding):,} tokens; the limit is {max_tokens:,}; shorten it")
        return tuple(encoding.ids)

    def encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of several short texts, without begin and end tokens."""
        return [tuple(each.ids) for each in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def texts(self, texts: Sequence[str], *, max_tokens: int | None = None, longest: int = 0) -> EncodedTexts:
        """Encode texts with the model's begin and end tokens. See `EncodedTexts`."""
        return EncodedTexts(self._forms, texts, max_tokens=max_tokens, longest=longest)

    def pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], *, max_second: int | None = None, longest: int = 0
    ) -> EncodedTexts:
        """Encode pairs for a model whose input is two texts. See `EncodedTexts`."""
        return EncodedTexts(self._forms, firsts, seconds, max_tokens=max_second, longest=longest)

    def count_up_to(self, text: str, max_tokens: int) -> int:
        """Return a text's approximate number of tokens, or some number above `max_tokens` if it has more.

        The text is encoded in pieces. One token per piece is not counted, because each cut may split a token.
        """
        num_tokens = 0
        for start in range(0, len(text), CHARACTERS_AT_ONCE):
            piece = self.encode(text[start : start + CHARACTERS_AT_ONCE], add_special_tokens=False)
            num_tokens += max(0, len(piece) - 1)
            if num_tokens > max_tokens:
                break
        return num_tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[int, ...]:
        """Return the token ids of the prompt that `render_chat` creates with these options."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Convert a conversation to a prompt with the model's chat template.

        With `continue_final_message`, the prompt ends within the last message. `template_variables` are extra variables
        for the template, such as `enable_thinking`. `app.text.chat_messages` adapts parts that the template does not
        support. The arguments of tool calls are passed as objects, or as the original JSON text if the template does
        not accept objects. Consecutive messages with the same role are joined if the template does not accept them.

        Raises InvalidRequest if the model has no chat template or the template does not accept the messages.
        """
        if not self._pretrained.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions with a prompt", param="messages")
        variables = dict(template_variables or {})
        taken = sorted(_reserved_variables() & variables.keys())
        if taken:
            raise InvalidRequest(
                f"chat_template_kwargs may not contain {', '.join(taken)}; remove it", param="chat_template_kwargs"
            )
        traits = self._template_traits
        whole = adapted(messages, tools or (), traits)
        variables |= {
            "tools": [dict(tool) for tool in tools] if tools and traits.tools else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        refusal: Exception | None = None
        for attempt in _forms(whole):
            try:
                return self._applied(attempt, **variables)
            except Exception as error:  # a template may raise any exception
                refusal = refusal or error
        raise InvalidRequest(
            f"the model's chat template does not accept these messages: {_brief(refusal)}", param="messages"
        ) from refusal

    def _applied(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Apply the chat template to these messages without adapting them. The template may raise any exception."""
        copies = [dict(each) for each in (in_parts(messages) if self._takes_parts else messages)]
        return str(self._pretrained.apply_chat_template(copies, tokenize=False, **options))

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template only accepts contents that are lists of parts, like some templates with images."""
        word = "carousel"

        def shows(content: Any) -> bool:
            try:
                message = {"role": "user", "content": content}
                return word in str(self._pretrained.apply_chat_template([message], tokenize=False))
            except Exception:  # a template may raise any exception
                return False

        return not shows(word) and shows([{"type": "text", "text": word}])

    @cached_property
    def _template_traits(self) -> TemplateTraits:
        """The chat template's traits, detected from its text and from trial prompts with system messages."""
        word = "carousel"
        system, question = {"role": "system", "content": word}, {"role": "user", "content": "Hi"}
        other, answer = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "Hi"}

        template = str(self._pretrained.chat_template)

        def shows(*messages: Mapping[str, Any]) -> bool:
            try:
                return word in self._applied(messages)
            except Exception:  # see `_takes_parts`
                return False

        return TemplateTraits(
            tools=self.has_tools_in_template,
            calls=self.has_in_template("tool_calls"),
            results=self.has_tools_in_template and re.search("['\"]tool['\"]", template) is not None,
            call_marks=call_marks_of(template),
            developer=self.has_in_template("developer"),
            system=shows(system, question),
            later_system=shows(other, question, system, answer, question),
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the token ids. Unknown ids are skipped."""
        max_decoded_at_once = 1000  # decoding this many token ids takes a fraction of a millisecond
        if len(token_ids) <= max_decoded_at_once:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        # For long lists, the batch call is used because it releases the interpreter lock.
        [text] = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token, including special tokens. The texts are cached."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode((token_id,), skip_special_tokens=False)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as it is written in the vocabulary, or "" for an unknown id."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def description(self) -> dict[str, Any]:
        """Return the special tokens and the chat template, under the names of tokenizer_config.json."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        return {
            "tokenizer_class": type(self._pretrained).__name__,
            "vocab_size": self._backend.get_vocab_size(),
            "chat_template": self._pretrained.chat_template,
        } | {name: getattr(self._pretrained, name) for name in names}


def _template_of_processor(path: str, revision: str | None) -> str | None:
    """Return the chat template from an image processor's separate file, or None if there is no such file.

    Raises InvalidSetup if the file cannot be read.
    """
    from transformers.utils.hub import cached_file

    name = "chat_template.json"
    file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    try:
        return None if file is None else str(json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidSetup(
            f"{path!r}: {name} must contain an object with the template as chat_template; reading it raised "
            f"{type(error).__name__}: {_brief(error)}"
        ) from error


@cache
def _reserved_variables() -> frozenset[str]:
    """Return the template variables that requests may not set, because `apply_chat_template` uses these names."""
    from transformers import PreTrainedTokenizerFast

    own = {"messages", "conversations", "generation_indices", "return_generation_indices"}
    return frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) | own


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the messages in the different forms that templates accept, with the most common form first."""
    joined = joined_turns(messages)
    for each in [messages] if len(joined) == len(messages) else [messages, joined]:
        if any(message.get("tool_calls") for message in each):
            yield _with_argument_objects(each)
        yield each


def _with_argument_objects(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Parse the arguments of tool calls in the messages if they are JSON objects."""
    return [
        {**message, "tool_calls": [_with_argument_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _brief(error: Exception | None) -> str:
    """Return the first line of an error's message, up to 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
