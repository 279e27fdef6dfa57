"""The command `carousel`. Imports only the module of the requested subcommand."""

from __future__ import annotations

import argparse
import hashlib
import math
import secrets
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS_OF_OTHERS = {  # maps commands of vLLM, SGLang, llama.cpp and Ollama to hints
    "run": "`carousel serve MODEL` serves a model; use `carousel chat` in another terminal to talk to it",
    "pull": "`carousel serve MODEL` downloads missing files",
    "list": "`curl http://127.0.0.1:8000/v1/models` lists the served models",
    "ls": "`curl http://127.0.0.1:8000/v1/models` lists the served models",
    "ps": "`curl http://127.0.0.1:8000/v1/models` lists the served models",
    "stop": "Press Ctrl-C in the terminal of `carousel serve` to stop the service",
    "rm": "Delete the model's folder; downloaded files are in ~/.cache/carousel and ~/.cache/huggingface",
    "show": "`carousel plan memory --model MODEL --cpu` shows how much memory a model needs",
    "create": "`carousel serve FOLDER` serves a folder or GGUF file directly; settings belong in a config file",
    "complete": "Send `POST /v1/completions` to a running service",
    "bench": "`python -m benchmarks.service.online` measures a running service",
    "run-batch": "`carousel bulk --input FILE --output FOLDER` answers the rows of a file",
    "collect-env": "`carousel --version` prints the versions",
}
COMMANDS = {  # name → (the function that receives the remaining arguments, one line of help)
    "serve": ("deployments.launcher.supervisor:main", "serve a model or a config file on this machine, until Ctrl-C"),
    "check": ("deployments.launcher.checks:main", "find mistakes in a config or a model, without serving it"),
    "chat": ("deployments.chat:main", "talk to a running service in this terminal"),
    "bulk": ("deployments.bulk.__main__:main", "answer every row of one or more files, without a server"),
    "plan": ("deployments.plan.__main__:main", "plan the memory of a device, or the replicas for a trace"),
    "key": ("deployments.cli:print_key", "make an API key"),
}


INTERRUPTED = 130  # the exit status of shells after Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand with the arguments that follow its name. Returns its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name == "--version":
        from app.versions import versions

        print("\n".join(f"{part} {version}" for part, version in versions().items() if version is not None))
        return 0
    if name not in COMMANDS:
        if name in COMMANDS_OF_OTHERS:
            print(f"carousel has no command {name}. {COMMANDS_OF_OTHERS[name]}", file=sys.stderr)
            return 2
        parser = argparse.ArgumentParser(prog="carousel", formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.epilog = "\n".join(f"carousel {each:6} {help_}" for each, (_, help_) in COMMANDS.items())
        parser.add_argument("command", choices=COMMANDS, help="`carousel COMMAND --help` lists its arguments")
        parser.parse_args([name])
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        return int(getattr(import_module(module), function)(rest))
    except KeyboardInterrupt:  # may also arrive during the import
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not disturb the exit
        return INTERRUPTED


def print_key(arguments: Sequence[str]) -> int:
    """Print a new API key and its entry for the file of keys. Nothing is stored."""
    parser = argparse.ArgumentParser(prog="carousel key", description="Make an API key.")
    parser.add_argument("name", help="name of the key; also used as the tenant of its requests")
    parser.add_argument("--admin", action="store_true", help="also allow the routes under /admin")
    given = parser.parse_args(arguments)
    key, entry = make_key(given.name, is_admin=given.admin)
    print(f"Key for {given.name}, which cannot be shown again:\n{key}\nEntry for the file in `api.keys_file`:\n{entry}")
    return 0


def make_key(name: str, *, is_admin: bool = False) -> tuple[str, str]:
    """Return a new key and its entry for the file in `api.keys_file`. The entry contains only a hash of the key."""
    num_random_bytes = 32  # cannot be guessed, so a fast hash is sufficient
    key = f"sk-carousel-{secrets.token_urlsafe(num_random_bytes)}"
    admin = ", admin: true" if is_admin else ""
    return key, f'- {{name: {name}, sha256: "{hashlib.sha256(key.encode()).hexdigest()}"{admin}}}'


def positive(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; must be at least 1")
    return value


def above_zero(text: str) -> float:
    """Parse a finite number above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; must be a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
