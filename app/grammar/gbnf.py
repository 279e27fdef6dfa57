"""Rewrites llama.cpp grammars (GBNF) to the subset that the Lark converter interprets in the same way as llama.cpp."""

from __future__ import annotations

import re

# Matches comments, texts, character classes, repetition counts, names, and any other single character.
_PARTS = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}|[\w-]+|.', re.DOTALL)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|(\\.)|(.)", re.DOTALL)
_RULE = re.compile(r"([\w-]+)[ \t]*::=")
_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_ANY_CHARACTER = "[\\x00-\U0010ffff]"
# In a character class, the compiler interprets any of these characters as an operator if it is written twice in a row.
_OPERATORS = "&-~"


def is_gbnf(text: str) -> bool:
    """Return whether a text contains a rule `root ::=`, which GBNF requires and Lark does not allow."""
    return _ROOT.search(text) is not None


def plain_gbnf(text: str) -> str:
    """Rewrite a grammar without syntax that the converter and llama.cpp interpret differently.

    Numeric escapes are replaced with characters. A dot matches any character, including a newline, and two operators in
    a class match two characters. Rules are renamed so that their names differ not only in case and dashes. Raises
    ValueError for an escape that is not a character.
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
    """Rewrite a quoted text. Unescapes brackets, because Lark does not allow these escapes."""
    characters = (_plain_character(found) for found in _CHARACTER.finditer(written))
    return "".join(each[1] if each in (r"\[", r"\]") else each for each in characters)


def _plain_class(written: str) -> str:
    """Rewrite a character class. The second of two consecutive equal operators becomes a numeric escape."""
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
        raise ValueError(f"{found[0]} is not a character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
