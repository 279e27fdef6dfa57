"""`carousel chat`: chats with a running service in the terminal, and streams its answers."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.errors import CarouselError
from deployments.cli import INTERRUPTED
from deployments.launcher.terminal import printable

DEFAULT_URL = "http://127.0.0.1:8000"
_KEY = "CAROUSEL_API_KEY"  # an environment variable
_SEVERAL_LINES = '"""'
_HELP = f"""/model NAME   switch to another model
/system TEXT  start a new chat with this system message, or with none
/clear        start a new chat with the current system message
/exit         end the chat, like Ctrl-D; Ctrl-C stops an answer
{_SEVERAL_LINES}           begins and ends a message of several lines"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a chat, or answer a single message. Returns the exit status: 0, 130 after Ctrl-C, or 1 after an error."""
    given = _arguments(arguments)
    settings = {name: getattr(given, name) for name in ("max_tokens", "temperature", "seed")}
    try:
        conversation = Chat(given.url, _key(), {k: v for k, v in settings.items() if v is not None})
        models = conversation.models()
        conversation.model = given.model or models[0]
        conversation.begin(given.system)
        if given.message is None and sys.stdin.isatty():
            others = f" Use /model to switch models: {', '.join(models)}." if len(models) > 1 else ""
            print(printable(f"Chat with {conversation.model} at {conversation.url}.{others} /help lists the commands."))
            _talk(conversation)
            return 0
        return 0 if conversation.answer(_only_message(given.message)) else INTERRUPTED
    except CarouselError as error:
        print(printable(error.message, may_have="\n"), file=sys.stderr)
        return 1
    except BrokenPipeError:  # for example, the output was piped to `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports an error at exit
        return 1


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="carousel chat", description="Talk to a running service in this terminal.")
    parser.add_argument(
        "message", nargs="?",
        help="answer this message and exit. Piped text is appended to the message, or used as the message. "
        "Without either, a chat starts",
    )  # fmt: skip
    parser.add_argument("--url", default=DEFAULT_URL, help="address of the service (default: %(default)s)")
    parser.add_argument("--model", help="name of a model; default: the service's first model")
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, help="the maximum number of tokens in an answer")
    parser.add_argument("--temperature", type=float, help="0 always chooses the most likely token")
    parser.add_argument("--seed", type=int, help="the same seed produces the same answer")
    parser.epilog = f"If the service requires an API key, set it in the environment variable {_KEY}."
    return parser.parse_args(arguments)


def _key() -> str:
    """Return the API key from the environment, or "" if it is not set. Raises CarouselError if it is malformed."""
    key = os.environ.get(_KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise CarouselError(f"{_KEY} contains characters that no key contains; `carousel key NAME` makes a key")
    return key


def _only_message(given: str | None) -> str:
    """Return the message from the command line, followed by piped text. Raises CarouselError if there is neither."""
    try:
        piped = "" if sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CarouselError(f"the piped text is not valid UTF-8: {error.reason}") from error
    message = "\n\n".join(filter(str.strip, (given or "", piped)))
    if not message:
        raise CarouselError("there is no message; pass it as an argument or pipe it in")
    return message


class Chat:
    """A conversation: the messages so far, and the model that answers them."""

    def __init__(self, url: str, key: str, settings: Mapping[str, Any]) -> None:
        """`url` may end in /v1, and `key` may be empty. `settings` are added to the body of each request."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._settings = dict(settings)
        self._messages: list[dict[str, str]] = []

    def begin(self, system: str) -> None:
        """Start a new conversation, with a system message if `system` is not empty."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def clear(self) -> None:
        """Start a new conversation with the current system message."""
        self._messages = [each for each in self._messages if each["role"] == "system"]

    def models(self) -> list[str]:
        """Return the names of the service's models. Raises CarouselError if there are none or it does not respond."""
        with self._opened("/v1/models") as answer:
            try:
                names = [str(model["id"]) for model in json.load(answer)["data"]]
            except (ValueError, TypeError, KeyError) as error:
                raise CarouselError(f"{self.url} is not a compatible server: it does not list its models") from error
        if not names:
            raise CarouselError(f"{self.url} has no models")
        return names

    def answer(self, message: str) -> bool:
        """Print the answer to a message as it is generated. Returns False if it was stopped with Ctrl-C.

        A stopped answer is still part of the conversation. Raises CarouselError if the request is refused or the answer
        breaks off. The conversation is then unchanged.
        """
        asked = [*self._messages, {"role": "user", "content": message}]
        body = {"model": self.model, "messages": asked, "stream": True, "stream_options": {"include_usage": True}}
        screen, began, first = _Screen(), time.monotonic(), None
        usage: dict[str, Any] = {}
        is_whole = True
        try:
            with self._opened("/v1/chat/completions", body | self._settings) as stream:
                for event in _events(stream):
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        first = first or time.monotonic()
                        screen.show_dim(choice["delta"].get("reasoning_content") or "")
                        screen.show(choice["delta"].get("content") or "")
        except KeyboardInterrupt:
            is_whole = False
        finally:
            screen.end("" if is_whole else " [stopped]")
        self._messages = [*asked, {"role": "assistant", "content": screen.text}]
        if usage and first is not None and sys.stdout.isatty():
            seconds, num_tokens = time.monotonic() - first, usage["completion_tokens"]
            rate = f", {(num_tokens - 1) / seconds:.0f} tokens/s" if num_tokens > 1 and seconds > 0 else ""
            print(f"{_DIM}{num_tokens} tokens{rate}, the first after {first - began:.2f} s{_PLAIN}")
        return is_whole

    def _opened(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request and return the open response. If it fails, raises CarouselError with the service's message."""
        content = None if body is None else json.dumps(body).encode()
        try:
            return urllib.request.urlopen(urllib.request.Request(self.url + path, content, self._headers))
        except urllib.error.HTTPError as error:
            raise CarouselError(_refusal(error)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise CarouselError(
                f"no service responds at {self.url} ({reason}); start one with `carousel serve`, or pass its address "
                f"with --url"
            ) from error


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, TypeError, KeyError, OSError):
        message = error.reason
    unauthorized = 401
    hint = f". `carousel chat` sends the key in the environment variable {_KEY}"
    return f"{error.code}: {message}{hint if error.code == unauthorized else ''}"


def _events(stream: Any) -> Iterator[dict[str, Any]]:
    """Yield the events of an answer. Raises CarouselError for an error event or a stream that breaks off."""
    try:
        for line in stream:
            name, _, data = line.decode().strip().partition(": ")
            if name != "data":
                continue
            if data == "[DONE]":
                return
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise CarouselError(event["error"]["message"])
            yield event
    except (OSError, http.client.HTTPException) as error:
        raise CarouselError(f"the answer was interrupted: {error}") from error
    raise CarouselError("the answer was interrupted")


class _Screen:
    """Writes one answer to the terminal. Removes control characters, which could manipulate the terminal."""

    def __init__(self) -> None:
        self.text = ""
        self._is_terminal = sys.stdout.isatty()
        self._is_dim = False
        self._last = "\n"

    def show(self, text: str) -> None:
        if text and self._is_dim:
            self._write(f"{_PLAIN}\n")
            self._is_dim = False
        self.text += text
        self._write(printable(text, may_have="\n\t"))

    def show_dim(self, text: str) -> None:
        """Write text that is not part of the answer. Does nothing if the output is not a terminal."""
        if text and self._is_terminal:
            self._write("" if self._is_dim else _DIM)
            self._is_dim = True
            self._write(printable(text, may_have="\n\t"))

    def end(self, remark: str) -> None:
        self.show_dim(remark)
        self._write((_PLAIN if self._is_dim else "") + ("" if self._last == "\n" else "\n"))

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            sys.stdout.write(text)
            sys.stdout.flush()


def _talk(conversation: Chat) -> None:
    """Read messages and answer them until the user ends the chat."""
    import readline  # noqa: F401  # adds a history and editing keys to `input`

    while True:
        try:
            message = _message()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if message.startswith("/exit"):
            return
        try:
            if message.startswith("/"):
                _run_command(conversation, message)
            elif message.strip():
                conversation.answer(message)
        except CarouselError as error:  # the next message may succeed
            print(printable(error.message, may_have="\n"), file=sys.stderr)


def _message() -> str:
    text = input(">>> ")
    if not text.startswith(_SEVERAL_LINES):
        return text
    lines = [text.removeprefix(_SEVERAL_LINES)]
    while not lines[-1].endswith(_SEVERAL_LINES):
        lines.append(input("... "))
    return "\n".join(lines).removesuffix(_SEVERAL_LINES)


def _run_command(conversation: Chat, message: str) -> None:
    """Run a chat command (a message that starts with a slash)."""
    command, _, rest = message.partition(" ")
    if command == "/clear":
        conversation.clear()
    elif command == "/system":
        conversation.begin(rest.strip())
    elif command == "/model":
        models = conversation.models()
        if rest.strip() in models:
            conversation.model = rest.strip()
        else:
            print(printable(f"There is no such model. The service has {', '.join(models)}."))
    else:
        print(_HELP if command == "/help" else f"There is no command {command}.\n{_HELP}")
