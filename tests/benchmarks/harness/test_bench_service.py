"""What a service of the benchmarks is made of."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.service import with_tools


def test_a_model_gets_a_place_for_tools(demo_path: Path) -> None:
    before = (demo_path / "chat_template.jinja").read_text()
    with with_tools(demo_path) as copy:
        assert (copy / "chat_template.jinja").read_text().endswith(before)
        assert "tools" in (copy / "chat_template.jinja").read_text()
    assert not copy.exists()
