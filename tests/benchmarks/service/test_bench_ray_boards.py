"""How Ray's queries are asked; a live run: docs/operate/monitoring.md."""

from __future__ import annotations

from benchmarks.service.ray_boards import for_all


def test_a_query_of_rays_is_asked_for_everything() -> None:
    expr = 'rate(ray_a_total{{deployment=~"$deployment", {global_filters}}}[$interval]) / rate(b{{r=~"$Route"}}[5m])'
    assert for_all(expr) == ('rate(ray_a_total{deployment=~".*", SessionName=~".*"}[1m]) / rate(b{r=~".*"}[5m])')
