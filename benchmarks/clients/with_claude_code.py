"""Claude Code as a person starts it, without its terminal: a shell call, the result of the call, the answer."""

from __future__ import annotations

import json

from benchmarks.clients.checks import BASE_URL, MODEL, OUT, expect, ran, run
from benchmarks.clients.told import ANSWER

_SETTINGS = {
    "HOME": str(OUT),  # Claude Code writes to this folder
    "ANTHROPIC_BASE_URL": BASE_URL,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # no telemetry, no updates
}


def _asked(*options: str, **variables: str) -> dict[str, object]:
    printed = ran("claude", "-p", "Say hello.", "--output-format", "json", *options, variables=_SETTINGS | variables)
    answer: dict[str, object] = json.loads(printed.strip().splitlines()[-1])
    expect(answer["is_error"] is False and answer["result"] == ANSWER, answer)
    return answer


def a_call_of_the_shell_and_its_result() -> None:
    answer = _asked("--allowedTools", "Bash")
    expect(answer["num_turns"] == 2, answer)


def a_text() -> None:
    answer = _asked("--tools", "")
    expect(answer["num_turns"] == 1, answer)


def a_budget_of_thinking_and_a_search_for_tools() -> None:
    _asked("--allowedTools", "Bash", MAX_THINKING_TOKENS="4000", ENABLE_TOOL_SEARCH="true")


if __name__ == "__main__":
    run(a_call_of_the_shell_and_its_result, a_text, a_budget_of_thinking_and_a_search_for_tools)
