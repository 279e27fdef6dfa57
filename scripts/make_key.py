"""Make an API key: `python -m scripts.make_key NAME`. The key is shown once; what is kept of it is a hash."""

from __future__ import annotations

import argparse
import hashlib
import secrets

NUM_RANDOM_BYTES = 32  # so many that a fast hash protects them: nobody can try them all


def make_key(name: str) -> tuple[str, str]:
    """A new key, and its entry for the file that `api.keys_file` names."""
    key = f"sk-carousel-{secrets.token_urlsafe(NUM_RANDOM_BYTES)}"
    return key, f'- {{name: {name}, sha256: "{hashlib.sha256(key.encode()).hexdigest()}"}}'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_key", description="Make an API key.")
    parser.add_argument("name", help="whose key it is; the tenant of its requests")
    name = parser.parse_args().name
    key, entry = make_key(name)
    print(f"For {name}, shown only now:\n{key}\nFor the file of `api.keys_file`:\n{entry}")


if __name__ == "__main__":
    main()
