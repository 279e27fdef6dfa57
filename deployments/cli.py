"""The command `carousel`, with the commands in `COMMANDS`. Each imports what it needs when it is called."""

from __future__ import annotations

import argparse
import hashlib
import math
import secrets
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS_OF_OTHERS = {  # what people type for vLLM, SGLang, llama.cpp and Ollama
    "run": "`carousel serve MODEL` serves a model, and `carousel chat` in another terminal talks to it",
    "pull": "`carousel serve MODEL` downloads what is not here",
    "list": "`curl http://127.0.0.1:8000/v1/models` lists what is served",
    "ls": "`curl http://127.0.0.1:8000/v1/models` lists what is served",
    "ps": "`curl http://127.0.0.1:8000/v1/models` lists what is served",
    "stop": "Ctrl-C in the terminal of `carousel serve` ends the service",
    "rm": "Delete the model's folder; what was downloaded lies in ~/.cache/carousel and ~/.cache/huggingface",
    "show": "`carousel plan memory --model MODEL --cpu` says what a model takes",
    "create": "`carousel serve FOLDER` serves a folder or a GGUF file as it is; settings are in a config file",
    "complete": "`POST /v1/completions` of a running service",
    "bench": "`python -m benchmarks.service.online` measures a running service",
    "run-batch": "`carousel bulk --input FILE --output FOLDER` answers the rows of a file",
    "collect-env": "`carousel --version` prints the versions",
}
COMMANDS = {  # name → the function that takes its arguments, and what it does
    "serve": ("deployments.launcher.supervisor:main", "serve a model or a config file on this machine, until Ctrl-C"),
    "check": ("deployments.launcher.checks:main", "find the mistakes in a config or a model, without a start"),
    "chat": ("deployments.chat:main", "talk to a running service in this terminal"),
    "bulk": ("deployments.bulk.__main__:main", "answer every row of some files, without a server"),
    "plan": ("deployments.plan.__main__:main", "say what fits on a device, and what a trace needs"),
    "key": ("deployments.cli:print_key", "make an API key"),
}


INTERRUPTED = 130  # the exit status that shells have for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of one command, which reads the arguments after its name."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name == "--version":
        from app.versions import versions

        print("\n".join(f"{part} {version}" for part, version in versions().items() if version is not None))
        return 0
    if name not in COMMANDS:
        if name in COMMANDS_OF_OTHERS:
            print(f"carousel {name}: there is no such command. {COMMANDS_OF_OTHERS[name]}", file=sys.stderr)
            return 2
        parser = argparse.ArgumentParser(prog="carousel", formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.epilog = "\n".join(f"carousel {each:6} {help_}" for each, (_, help_) in COMMANDS.items())
        parser.add_argument("command", choices=COMMANDS, help="`carousel COMMAND --help` has its arguments")
        parser.parse_args([name])
    module, _, function = COMMANDS[name][0].partition(":")
    try:
        return int(getattr(import_module(module), function)(rest))
    except KeyboardInterrupt:  # also while modules are imported
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends already
        return INTERRUPTED


def print_key(arguments: Sequence[str]) -> int:
    """Show a new key once, with the entry that is kept of it."""
    parser = argparse.ArgumentParser(prog="carousel key", description="Make an API key.")
    parser.add_argument("name", help="name of the key: the tenant of its requests")
    parser.add_argument("--admin", action="store_true", help="it opens the routes under /admin too")
    given = parser.parse_args(arguments)
    key, entry = make_key(given.name, is_admin=given.admin)
    print(f"For {given.name}, shown only now:\n{key}\nFor the file of `api.keys_file`:\n{entry}")
    return 0


def make_key(name: str, *, is_admin: bool = False) -> tuple[str, str]:
    """A new key, and its entry for the file that `api.keys_file` names: a hash is all that is kept of it."""
    num_random_bytes = 32  # too many to try, so that a fast hash protects them
    key = f"sk-carousel-{secrets.token_urlsafe(num_random_bytes)}"
    admin = ", admin: true" if is_admin else ""
    return key, f'- {{name: {name}, sha256: "{hashlib.sha256(key.encode()).hexdigest()}"{admin}}}'


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; must be at least 1")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0, for argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; must be a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
