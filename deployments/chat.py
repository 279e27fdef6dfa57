"""`carousel chat`: talk to a running service in a terminal. Answers appear as they are generated."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from app.errors import CarouselError

_KEY = "CAROUSEL_API_KEY"  # an environment variable
_SEVERAL_LINES = '"""'
_HELP = f"""/model NAME   talk to another model
/system TEXT  begin anew with this system message, or without one
/clear        begin anew
/exit         end, as Ctrl-D does; Ctrl-C stops an answer
{_SEVERAL_LINES}           begins and ends a message of several lines"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when the user ends the chat or the one message is answered, else 1."""
    given = _arguments(arguments)
    conversation = Conversation(
        given.url.rstrip("/").removesuffix("/v1"),
        key=os.environ.get(_KEY),
        settings={
            name: value for name in ("max_tokens", "temperature", "seed") if (value := getattr(given, name)) is not None
        },
    )
    try:
        models = conversation.models()
        conversation.model = given.model or models[0]
        conversation.begin(given.system)
        if given.message is not None or not sys.stdin.isatty():
            conversation.answer(sys.stdin.read() if given.message is None else given.message)
        else:
            others = f" /model takes {', '.join(models)}." if len(models) > 1 else ""
            print(f"Chat with {conversation.model} at {conversation.url}.{others} /help lists the commands.")
            _talk(conversation)
    except CarouselError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="carousel chat", description="Talk to a running service in this terminal.")
    parser.add_argument("message", nargs="?", help="answer this and end; also what is piped in. Without it: a chat")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (%(default)s)")
    parser.add_argument("--model", help="by default the first that the service has")
    parser.add_argument("--system", default="", help="the system message")
    parser.add_argument("--max-tokens", type=int, help="of an answer")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.epilog = f"The environment variable {_KEY} has the API key, if the service wants one."
    return parser.parse_args(arguments)


class Conversation:
    """The messages so far, and the model that answers."""

    def __init__(self, url: str, *, key: str | None, settings: dict[str, Any]) -> None:
        self.url = url
        self.model = ""
        self._key = key
        self._settings = settings
        self._messages: list[dict[str, str]] = []

    def begin(self, system: str) -> None:
        """Forget all messages."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def clear(self) -> None:
        """Forget all messages but the system message."""
        self._messages = [each for each in self._messages if each["role"] == "system"]

    def models(self) -> list[str]:
        """The names of the models that the service has."""
        with self._opened("/v1/models") as answer:
            return [model["id"] for model in json.load(answer)["data"]]

    def answer(self, message: str) -> None:
        """Print the answer to a message while it is generated. An answer that Ctrl-C stops stays in the conversation.

        Raises CarouselError if the service refuses the request or is lost; the message is forgotten then.
        """
        asked = [*self._messages, {"role": "user", "content": message}]
        body = {"model": self.model, "messages": asked, "stream": True, "stream_options": {"include_usage": True}}
        screen, began, first = _Screen(), time.monotonic(), None
        usage: dict[str, Any] = {}
        try:
            with self._opened("/v1/chat/completions", body | self._settings) as stream:
                for event in _events(stream):
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        first = first or time.monotonic()
                        screen.show(choice["delta"].get("reasoning_content") or "", is_dim=True)
                        screen.show(choice["delta"].get("content") or "")
        except KeyboardInterrupt:
            screen.show(" [stopped]", is_dim=True, is_kept=False)
        except (OSError, http.client.HTTPException) as error:
            raise CarouselError(f"\nthe answer broke off: {error}") from error
        finally:
            screen.end()
        self._messages = [*asked, {"role": "assistant", "content": screen.text}]
        if usage and first is not None and sys.stdout.isatty():
            seconds, num_tokens = time.monotonic() - first, usage["completion_tokens"]
            rate = f", {(num_tokens - 1) / seconds:.0f} tokens/s" if num_tokens > 1 and seconds > 0 else ""
            print(f"{_DIM}{num_tokens} tokens{rate}, the first after {first - began:.2f} s{_PLAIN}")

    def _opened(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """An answer of the service. Raises CarouselError, with what the service says, if there is none."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        content = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, content, headers))
        except urllib.error.HTTPError as error:
            raise CarouselError(_refusal(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CarouselError(
                f"no service answers at {self.url} ({reason}): start one with `carousel serve`, or name its address "
                f"with --url"
            ) from error


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, TypeError, KeyError, OSError):
        message = error.reason
    unauthorized = 401
    hint = f". `carousel chat` sends the key that the environment variable {_KEY} has"
    return f"{error.code}: {message}{hint if error.code == unauthorized else ''}"


def _events(stream: Any) -> Iterator[dict[str, Any]]:
    """The events of an answer. Raises CarouselError for an event that is an error."""
    for line in stream:
        name, _, data = line.decode().strip().partition(": ")
        if name != "data" or data == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise CarouselError(event["error"]["message"])
        yield event


class _Screen:
    """The text of one answer. Control characters, which could change the terminal, are left out."""

    def __init__(self) -> None:
        self.text = ""
        self._is_dim = self._ends_line = False

    def show(self, text: str, *, is_dim: bool = False, is_kept: bool = True) -> None:
        if not text:
            return
        self.text += text if is_kept and not is_dim else ""
        if sys.stdout.isatty() and is_dim != self._is_dim:
            sys.stdout.write(_DIM if is_dim else f"{_PLAIN}\n")
            self._is_dim = is_dim
        shown = "".join(each for each in text if each.isprintable() or each in "\n\t")
        self._ends_line = shown.endswith("\n") if shown else self._ends_line
        sys.stdout.write(shown)
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write((_PLAIN if self._is_dim else "") + ("" if self._ends_line else "\n"))
        sys.stdout.flush()


def _talk(conversation: Conversation) -> None:
    """Answer messages until the user ends the chat."""
    import readline  # noqa: F401  # `input` gets a history and keys that edit

    while True:
        try:
            message = _message()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, rest = message.partition(" ")
        if command in ("/exit", "/bye", "/quit"):
            return
        if command == "/help":
            print(_HELP)
        elif command == "/clear":
            conversation.clear()
        elif command == "/system":
            conversation.begin(rest.strip())
        elif command == "/model":
            _change_model(conversation, rest.strip())
        elif message.strip():
            try:
                conversation.answer(message)
            except CarouselError as error:  # the next message may be answered
                print(error.message, file=sys.stderr)


def _message() -> str:
    text = input(">>> ")
    if not text.startswith(_SEVERAL_LINES):
        return text
    lines = [text.removeprefix(_SEVERAL_LINES)]
    while not lines[-1].endswith(_SEVERAL_LINES):
        lines.append(input("... "))
    return "\n".join(lines).removesuffix(_SEVERAL_LINES)


def _change_model(conversation: Conversation, name: str) -> None:
    models = conversation.models()
    if name in models:
        conversation.model = name
    else:
        print(f"The service has {', '.join(models)}.")
