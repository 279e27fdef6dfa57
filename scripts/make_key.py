"""Make an API key: `python -m scripts.make_key NAME`. The key is shown once; what is kept of it is a hash."""

from __future__ import annotations

import argparse
import hashlib
import secrets

NUM_RANDOM_BYTES = 32  # too many to try, so that a fast hash protects them


def make_key(name: str, *, is_admin: bool = False) -> tuple[str, str]:
    """A new key, and its entry for the file that `api.keys_file` names."""
    key = f"sk-carousel-{secrets.token_urlsafe(NUM_RANDOM_BYTES)}"
    admin = ", admin: true" if is_admin else ""
    return key, f'- {{name: {name}, sha256: "{hashlib.sha256(key.encode()).hexdigest()}"{admin}}}'


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.make_key", description="Make an API key.")
    parser.add_argument("name", help="name of the key: the tenant of its requests")
    parser.add_argument("--admin", action="store_true", help="it opens the routes under /admin too")
    arguments = parser.parse_args()
    name = arguments.name
    key, entry = make_key(name, is_admin=arguments.admin)
    print(f"For {name}, shown only now:\n{key}\nFor the file of `api.keys_file`:\n{entry}")


if __name__ == "__main__":
    main()
