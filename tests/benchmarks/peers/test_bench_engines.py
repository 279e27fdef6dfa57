"""Other engines as entries: what stands in for llama.cpp's program prints what the real one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peers import engines

LINE = {"pp": 16, "tg": 4, "pl": 2, "t_pp": 0.5, "t_tg": 2.0}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-batched-bench"
    path.write_text(f"#!/bin/sh\necho \"$@\" >> {tmp_path}/log\necho chatter\necho '{json.dumps(LINE)}'\n")
    path.chmod(0o755)
    return path


def workload(folder: Path, *prompt_lengths: int) -> str:
    lines = [
        {"id": f"r{number}", "prompt_token_ids": [7] * length, "max_tokens": 4, "ignore_eos": True}
        for number, length in enumerate(prompt_lengths)
    ]
    path = folder / "decode_2.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(program: Path, path: str) -> int:
    return engines.main(
        ["llama-cpp", "--model", "m.gguf", "--workload", path, "--program", str(program), "--threads", "2",
         "--repeat", "1"]
    )  # fmt: skip


def test_llama_cpp_is_asked_for_the_workloads_sizes_and_its_times_become_figures(
    tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(program, workload(tmp_path, 16, 16)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith("-c 40 -npp 16 -ntg 4 -npl 2")
    assert found["prompt_tokens_per_s"] == 2 * 16 / 0.5
    assert found["decode_tokens_per_s"] == pytest.approx(2 * 4 / 2.0)
    assert found["seconds"] == 0.5 + 3 * 0.5  # the first token comes with the prompts, three steps follow
