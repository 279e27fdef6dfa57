"""Codex CLI as a person starts it, without its terminal: a shell call, the result of the call, the answer."""

from __future__ import annotations

from benchmarks.clients.checks import BASE_URL, MODEL, OUT, expect, ran, run
from benchmarks.clients.told import ANSWER, RESULT

CONFIG = f"""model = "{MODEL}"
model_provider = "carousel"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.carousel]
name = "Carousel"
base_url = "{BASE_URL}/v1"
env_key = "CAROUSEL_API_KEY"
wire_api = "responses"
"""


def _asked(*options: str) -> None:
    (OUT / "config.toml").write_text(CONFIG, encoding="utf-8")
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")  # the command only counts
    settings = {"HOME": str(OUT), "CODEX_HOME": str(OUT), "CAROUSEL_API_KEY": "none"}
    printed = ran("codex", "exec", *free, *options, "Say hello.", variables=settings)
    expect(RESULT in printed and printed.strip().endswith(ANSWER), printed[-400:])


def a_call_of_the_shell_and_its_result() -> None:
    _asked()


def an_effort_a_summary_and_a_search() -> None:
    _asked(
        "-c", 'model_reasoning_effort="high"', "-c", 'model_reasoning_summary="detailed"', "-c", 'web_search="live"'
    )  # fmt: skip


if __name__ == "__main__":
    run(a_call_of_the_shell_and_its_result, an_effort_a_summary_and_a_search)
