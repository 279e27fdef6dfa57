"""llama.cpp's grammars: what its page about them says holds here."""

from __future__ import annotations

import pytest
from llguidance import LLTokenizer

from app.engine.request import GrammarKind
from app.grammar.compiling import Unusable, compiled, new_matcher

TOKENIZER = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    made = compiled(TOKENIZER, GrammarKind.GRAMMAR, grammar, is_lenient=False, special={})
    matcher = new_matcher(TOKENIZER, made.larks[0])
    written = list(text.encode())
    return bool(matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # escapes by number
        (r'root ::= "A" "\u00e9"', ["Aé"], ["A\\u00e9", "Ae"]),
        (r'root ::= "\x41\xe9\u4e2d\U0001F600"', ["Aé中😀"], []),
        (r'root ::= "\u0022\u005c\x0a\u2028"', ['"\\\n\u2028'], []),
        (r"root ::= [\u00e9\U0001F600]", ["é", "😀"], ["e", "u"]),
        (r"root ::= [^\x00-\u00ff]", ["中"], ["é", "a"]),
        (r"root ::= [\u005d\u005b\u005e\u002d]", ["]", "[", "^", "-"], ["\\", "a"]),
        (r'root ::= "\t\r\n\\\"\[\]"', ['\t\r\n\\"[]'], []),
        # characters
        ("root ::= .", ["\n", "é", "."], ["", "ab"]),
        ("root ::= [.]", ["."], ["a"]),
        ('root ::= ".[a]#"', [".[a]#"], []),
        ("root ::= [&&~~a]", ["&", "~", "a"], ["b"]),
        ("root ::= [^--]", ["a", "\n"], ["-"]),
        ("root ::= [a/-]", ["/", "-"], ["b"]),
        # names of rules
        ('root ::= A-b aB start\nA-b ::= "x"\naB ::= "y"\nstart ::= "z"', ["xyz"], ["xxz"]),
        ('root ::= a | a2{2,2}\na ::= "1"\na2 ::= "2"', ["1", "22"], ["2"]),
        ('root ::= x # y ::= "1"\nx ::= "#2"', ["#2"], ["1"]),
        # sequences and repetitions
        ('root ::= (\n  "a" # first\n  | "b"\n)+ "c"?', ["a", "bac"], ["c"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2}\r\n', ["aab", "aabbcc"], ["ab", "aabccc"]),
    ],
)
def test_a_grammar_takes_what_it_says(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in [*good, *bad] if accepts(grammar, text)] == good


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (r'root ::= "\ud83d"', "is not a character"),
        (r'root ::= "\U00110000"', "is not a character"),
        (r'root ::= "\u00"', "Invalid"),
        ("root ::= other", "Rule 'other' not found"),
        ('other ::= "a"', "No 'root' rule"),
        ('root ::= "a', "neither Lark nor GBNF"),
    ],
)
def test_what_is_wrong_is_refused(grammar: str, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        accepts(grammar, "")


def test_a_lark_grammar_stays_as_it_is() -> None:
    assert accepts('start: "\\u00e9" A\nA: /[a-z&&[^b]]/', "éc")
