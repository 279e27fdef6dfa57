"""What an ingress process must not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import app.api, app.text
tokenizer = app.text.Tokenizer.load(sys.argv[1])
ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
app.text.Detokenizer(tokenizer).push(ids)
heavy = {"torch", "ray", "app.model", "app.engine.engine"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_the_api_and_its_tokenizer_load_neither_torch_nor_ray(demo_path: Path) -> None:
    project = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", PROGRAM, str(demo_path)], check=True, cwd=project)
