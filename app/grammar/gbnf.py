"""Rewrites llama.cpp's grammars (GBNF) to the subset that the converter to Lark reads as llama.cpp does."""

from __future__ import annotations

import re

# Matches comments, texts, character classes, repetition counts, names, and single characters between these.
_PARTS = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}|[\w-]+|.', re.DOTALL)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|(\\.)|(.)", re.DOTALL)
_RULE = re.compile(r"([\w-]+)[ \t]*::=")
_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_ANY_CHARACTER = "[\\x00-\U0010ffff]"
# Two of these characters in a row are an operator for the compiler if they are in a character class.
_OPERATORS = "&-~"


def is_gbnf(text: str) -> bool:
    """Return whether a text has the rule `root ::=`, which every GBNF grammar has and Lark cannot read."""
    return _ROOT.search(text) is not None


def plain_gbnf(text: str) -> str:
    """Rewrite a grammar without the syntax that the converter and llama.cpp read differently.

    Numeric escapes become the character itself. A dot is any character, including a line feed, and two operators in a
    class are two characters. Rules get names that differ in more than capitals and dashes. Raises ValueError for an
    escape that is no character.
    """
    parts = _PARTS.findall(text)
    without_comments = "".join(part if part[0] not in '#"[{' else " " for part in parts)
    rules = {name: f"r{number}-{name}" for number, name in enumerate(dict.fromkeys(_RULE.findall(without_comments)))}
    rules.pop("root", None)
    return "".join(_plain_part(part, rules) for part in parts)


def _plain_part(part: str, rules: dict[str, str]) -> str:
    match part[0]:
        case '"' if len(part) > 1:
            return f'"{_plain_text(part[1:-1])}"'
        case "[" if len(part) > 1:
            negation = "^" if part[1] == "^" else ""
            return f"[{negation}{_plain_class(part[1 + len(negation) : -1])}]"
        case ".":
            return _ANY_CHARACTER
        case _:
            return rules.get(part, part)


def _plain_text(written: str) -> str:
    """Rewrite a text. Brackets lose their escapes, which Lark does not allow in a text."""
    characters = (_plain_character(found) for found in _CHARACTER.finditer(written))
    return "".join(each[1] if each in (r"\[", r"\]") else each for each in characters)


def _plain_class(written: str) -> str:
    """Rewrite a class: the second of two equal operators in a row, which starts no range, becomes a numeric escape."""
    plain = ""
    for found in _CHARACTER.finditer(written):
        character = _plain_character(found)
        is_second = character in _OPERATORS and plain[-1:] == character
        plain += f"\\x{ord(character):02x}" if is_second else character
    return plain


def _plain_character(found: re.Match[str]) -> str:
    *numbers, escape, character = found.groups()
    number = next((each for each in numbers if each is not None), None)
    if number is None:
        return str(escape or character)
    code = int(number, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
