"""From text to a syntax tree, or to an error that says where and what was expected (RFC 0005)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken, VisitError
from lark.lark import PostLex

from opendata_queue.filters.errors import FilterError
from opendata_queue.filters.nodes import (
    And,
    Between,
    Boolean,
    Comparison,
    Condition,
    Exists,
    Field,
    Header,
    In,
    Like,
    Literal,
    Not,
    Number,
    Operator,
    Or,
    Rule,
    SystemField,
    Text,
)
from opendata_queue.filters.validation import (
    MAX_DEPTH,
    Source,
    checked_text,
    number_limits,
    too_deep,
    validate,
)
from opendata_queue.filters.values import MAX_PRIORITY, NUMBER_SYNTAX, parse_priority

RESERVED_WORDS: Final = frozenset(
    ("AND", "BETWEEN", "ESCAPE", "EXISTS", "FALSE", "IN", "IS", "LIKE", "NOT", "NULL", "OR", "TRUE")
)
# Also the name of a header that filters will want to ask for; a name never stands where this does.
PRIORITY_WORD: Final = "PRIORITY"
SYSTEM_PREFIX: Final = "sys."
MATCH_ALL: Final = Rule(Boolean(True))

_SYSTEM_FIELDS: Final = {field.text: field for field in SystemField}
_is_bare_name = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*").fullmatch
_is_number = re.compile(NUMBER_SYNTAX).fullmatch
_looks_like_number = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?").fullmatch

_PLAIN_TERM: Final = r"([A-Za-z_][A-Za-z0-9_.\-]*) = '([^']*(?:''[^']*)*)'(?!')"
_plain_terms = re.compile(_PLAIN_TERM).findall
# So few that no limit of a filter is near.
_is_plain = re.compile(rf"{_PLAIN_TERM}(?: AND {_PLAIN_TERM}){{0,7}}").fullmatch

_is_priority_first = re.compile(r"(?:.*;)?\s*PRIORITY\s+", re.ASCII | re.DOTALL | re.I).fullmatch

_END: Final = "$END"
# What a set of acceptable terminals means to a person; the first that fits takes its terminals.
_NAMES: Final = ("NAME", "QUOTED_NAME", PRIORITY_WORD)
_PHRASES: Final[tuple[tuple[Collection[str], str], ...]] = (
    ((*_NAMES, "SYSTEM_FIELD", "NOT", "EXISTS", "LPAR", "TRUE", "FALSE", "STRING", "NUMBER"),
     "a condition, such as type = 'order.created'"),
    (("OPERATOR", "IN", "NOT", "BETWEEN", "LIKE", "IS"),
     "a comparison, such as = 'text', > 5, IN (…), BETWEEN, LIKE or IS NULL"),
    (("STRING", "NUMBER", "TRUE", "FALSE"), "a literal, such as 'text' or 5"),
    (("STRING", "NUMBER"), "a literal, such as 'text' or 5"),
    ((*_NAMES, "SYSTEM_FIELD"), "the name of a header or of a system field"),
    ((*_NAMES, "NUMBER"), "a number from 0 to 255 or the name of a header"),
    (_NAMES, "the name of a header"),
    (("STRING",), "text in single quotes"),
    (("OPERATOR",), "a comparison operator, such as ="),
    (("AND",), "AND"),
    (("OR",), "OR"),
    (("NOT",), "NOT"),
    (("NULL",), "NULL"),
    (("IN",), "IN"),
    (("BETWEEN",), "BETWEEN"),
    (("LIKE",), "LIKE"),
    (("ESCAPE",), "ESCAPE"),
    (("COMMA",), ","),
    (("LPAR",), "("),
    (("RPAR",), ")"),
    ((PRIORITY_WORD,), "PRIORITY"),
    (("SEMICOLON",), ";"),
    ((_END,), "the end of the filter"),
)  # fmt: skip


def is_bare_name(name: str) -> bool:
    """Whether a header's name can stand in a filter without quotes."""
    return (
        _is_bare_name(name) is not None
        and name.upper() not in RESERVED_WORDS
        and not name.lower().startswith(SYSTEM_PREFIX)
    )


def parse_rules(text: str) -> tuple[Rule, ...]:
    """The rules that ``text`` says, valid; ``FilterError`` for everything that is no filter."""
    checked_text(text)
    return plain_rules(text) or grammar_rules(text)


def plain_rules(text: str) -> tuple[Rule] | None:
    """The rule of a text that asks for nothing, or for equal texts, as most do; none for any other.

    It is what the grammar makes of the same text, in a fraction of the time: opening a root with
    many queues parses all their filters.
    """
    if not text:
        return (MATCH_ALL,)
    if not _is_plain(text):
        return None
    terms: list[Condition] = []
    for name, value in _plain_terms(text):
        if not is_bare_name(name):
            return None
        terms.append(Comparison(Header(name), Operator.EQUAL, Text(value.replace("''", "'"))))
    return (Rule(terms[0] if len(terms) == 1 else And(tuple(terms))),)


def grammar_rules(text: str) -> tuple[Rule, ...]:
    """The rules of any text."""
    builder = _Builder()
    try:
        rules: tuple[Rule, ...] = builder.transform(_lark().parse(text))
    except VisitError as error:
        if isinstance(error.orig_exc, _MistakeError):
            raise error.orig_exc.as_filter_error(text) from None
        raise
    except _MistakeError as error:
        raise error.as_filter_error(text) from None
    except UnexpectedCharacters as error:
        raise FilterError(_bad_character(text, error), text=text, offset=_offset(error)) from None
    except UnexpectedToken as error:
        at_end = error.token.type == _END
        offset = len(text.rstrip(" \t\r\n")) if at_end else _offset(error)
        raise FilterError(_bad_token(text, error), text=text, offset=offset) from None
    validate(rules, Source(text, builder.offsets))
    return rules


class _MistakeError(Exception):
    """A mistake that the grammar can't see, on its way to becoming a ``FilterError``."""

    def __init__(self, reason: str, token: Token) -> None:
        super().__init__(reason)
        self.reason = reason
        self.offset = token.start_pos or 0

    def as_filter_error(self, text: str) -> FilterError:
        return FilterError(self.reason, text=text, offset=self.offset)


class _Tokens(PostLex):
    """Separates words from names, checks numbers, and stops at text that is nested too deep.

    Words are recognised here and not by a regular expression that ignores case: to that, the
    Kelvin sign is a K. Nesting counts each open parenthesis and each NOT before it, so that
    nothing behind the lexer ever recurses deeper.
    """

    always_accept = ()

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        opened = [0]  # the nesting inside of each parenthesis that is open
        nesting = 0
        for raw in stream:
            token = _classified(raw)
            if token.type in ("NOT", "LPAR"):
                nesting += 1
                if nesting > MAX_DEPTH:
                    raise _MistakeError(too_deep(), token)
                if token.type == "LPAR":
                    opened.append(nesting)
            elif token.type in ("AND", "OR", "SEMICOLON"):
                nesting = opened[-1]
            elif token.type == "RPAR" and len(opened) > 1:
                opened.pop()
                nesting = opened[-1]
            yield token


def _classified(token: Token) -> Token:
    if token.type == "NUMBER":
        return _checked_number(token)
    if token.type != "NAME":
        return token
    word = token.upper()
    if word in RESERVED_WORDS or word == PRIORITY_WORD:
        return Token.new_borrow_pos(word, token.value, token)
    if not token.lower().startswith(SYSTEM_PREFIX):
        return token
    if token.value not in _SYSTEM_FIELDS:
        known = ", ".join(_SYSTEM_FIELDS)
        reason = (
            f"{token.value} is no system field; there are {known}"
            f' (the header of that name is "{token.value}")'
        )
        raise _MistakeError(reason, token)
    return Token.new_borrow_pos("SYSTEM_FIELD", token.value, token)


def _checked_number(token: Token) -> Token:
    if _is_number(token.value):
        return token
    if _looks_like_number(token.value):
        raise _MistakeError(number_limits(), token)
    reason = f"{token.value} is no number: digits, and perhaps a point and more digits"
    raise _MistakeError(reason, token)


@cache
def _lark() -> Lark:
    grammar = files("opendata_queue.filters").joinpath("grammar.lark").read_text("utf-8")
    return Lark(grammar, parser="lalr", lexer="basic", postlex=_Tokens())


_Node = TypeVar("_Node")


@v_args(inline=True)
class _Builder(Transformer[Token, Any]):
    """Makes nodes of lark's tree and notes where each starts. One for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[int, int] = {}

    def _at(self, place: object, node: _Node) -> _Node:
        """``node``, which starts where ``place``, a token or a node, does."""
        start = place.start_pos if isinstance(place, Token) else self.offsets.get(id(place))
        self.offsets[id(node)] = start or 0
        return node

    def start(self, *rules: Rule) -> tuple[Rule, ...]:
        return rules or (MATCH_ALL,)

    def rule(
        self,
        condition: Condition,
        _word: Token | None = None,
        source: Token | Header | None = None,
    ) -> Rule:
        if not isinstance(source, Token):
            return self._at(condition, Rule(condition, source))
        priority = parse_priority(source.value)
        if priority is None:
            raise _MistakeError(f"a priority is a whole number from 0 to {MAX_PRIORITY}", source)
        return self._at(condition, Rule(condition, priority))

    def disjunction(self, *parts: Condition | Token) -> Or:
        return self._at(parts[0], Or(tuple(_flat(Or, parts))))

    def conjunction(self, *parts: Condition | Token) -> And:
        return self._at(parts[0], And(tuple(_flat(And, parts))))

    def negation(self, word: Token, condition: Condition) -> Not:
        return self._at(word, Not(condition))

    def constant(self, word: Token) -> Boolean:
        return self._at(word, Boolean(word.type == "TRUE"))

    boolean = constant

    def comparison(self, field: Field, operator: Token, literal: Literal) -> Comparison:
        return self._at(field, Comparison(field, _operator(operator), literal))

    def mirrored_comparison(self, literal: Literal, operator: Token, field: Field) -> Comparison:
        return self._at(literal, Comparison(field, _operator(operator).mirrored, literal))

    def membership(self, field: Field, *rest: Token | Literal) -> Condition:
        literals = tuple(item for item in rest if not isinstance(item, Token))
        return self._negated(rest[0], field, In(field, literals))

    def range(self, field: Field, *rest: Any) -> Condition:
        low, _, high = rest[-3:]
        return self._negated(rest[0], field, Between(field, low, high))

    def likeness(self, field: Field, *rest: Token) -> Condition:
        pattern, *escape = [_unquoted(token) for token in rest if token.type == "STRING"]
        word = next(token for token in rest if token.type == "LIKE")
        like = Like(_header(field, word), pattern, escape[0] if escape else None)
        return self._negated(rest[0], rest[-1], like)

    def null_test(self, field: Field, word: Token, *rest: Token) -> Condition:
        exists = self._at(field, Exists(_header(field, word)))
        return exists if rest[0].type == "NOT" else self._at(field, Not(exists))

    def existence(self, word: Token, header: Header) -> Exists:
        return self._at(word, Exists(header))

    def _negated(self, first: object, place: object, condition: Condition) -> Condition:
        """``condition``, in a ``Not`` if the first token behind the field is NOT."""
        self._at(place, condition)
        if isinstance(first, Token) and first.type == "NOT":
            return self._at(place, Not(condition))
        return condition

    def header(self, token: Token) -> Header:
        name = _unquoted(token) if token.type == "QUOTED_NAME" else token.value
        return self._at(token, Header(name))

    def system_field(self, token: Token) -> SystemField:
        return self._at(token, _SYSTEM_FIELDS[token.value])

    def literal(self, token: Token) -> Literal:
        if token.type == "STRING":
            return self._at(token, Text(_unquoted(token)))
        return self._at(token, Number(Decimal(token.value)))


def _flat(
    connective: type[And] | type[Or], parts: Collection[Condition | Token]
) -> Iterator[Condition]:
    for part in parts:
        if isinstance(part, Token):
            continue
        if isinstance(part, And | Or) and isinstance(part, connective):
            yield from part.operands
        else:
            yield part


def _operator(token: Token) -> Operator:
    return Operator.NOT_EQUAL if token.value == "!=" else Operator(token.value)


def _header(field: Field, word: Token) -> Header:
    if isinstance(field, SystemField):
        reason = f"{word.upper()} is for headers; {field.text} is a number and always there"
        raise _MistakeError(reason, word)
    return field


def _unquoted(token: Token) -> str:
    quote = token[0]
    return token[1:-1].replace(quote * 2, quote)


def _offset(error: UnexpectedInput) -> int:
    return error.pos_in_stream or 0


def _bad_character(text: str, error: UnexpectedCharacters) -> str:
    character = text[_offset(error)]
    if character == "'":
        return "the text that starts here has no closing '"
    if character == '"':
        return 'the name that starts here has no closing "'
    if character in "‘’“”`´":
        return f"{character} is no quote here: text goes in '…', names of headers in \"…\""
    shown = repr(character) if character.isprintable() else f"U+{ord(character):04X}"
    hint = ""
    if character.isalpha():
        hint = '; a name with other characters than A-Z, a-z, 0-9, _, . and - goes in "…"'
    return f"the character {shown} means nothing here{hint}"


def _bad_token(text: str, error: UnexpectedToken) -> str:
    token, accepted = error.token, set(error.accepts or error.expected)
    if accepted.issuperset((PRIORITY_WORD, "SEMICOLON")):
        accepted |= {"AND", "OR"}  # the parser has just closed the condition, and forgot
    if "NAME" in accepted:
        accepted.discard(_END)  # a text without any condition, which is hardly meant
    hint = _priority_hint(text, token) or _hint(token, accepted)
    return f"expected {_in_words(accepted)}, but found {_found(token)}{hint}"


def _in_words(accepted: set[str]) -> str:
    phrases = []
    left = set(accepted)
    for terminals, phrase in _PHRASES:
        if left.issuperset(terminals):
            left.difference_update(terminals)
            phrases.append(phrase)
    *most, last = phrases or ["something else"]
    return f"{', '.join(most)} or {last}" if most else last


def _shown(token: Token) -> str:
    return token.value if len(token.value) <= 40 else f"{token.value[:40]}…"


def _found(token: Token) -> str:
    shown = _shown(token)
    match token.type:
        case "$END":
            return "the end of the filter"
        case "NAME" | "QUOTED_NAME" | "SYSTEM_FIELD":
            return f"the name {shown}"
        case "STRING":
            return f"the text {shown}"
        case "NUMBER":
            return f"the number {shown}"
        case kind if kind in RESERVED_WORDS or kind == PRIORITY_WORD:
            return kind
    return shown


_HINTS: Final[Mapping[str, str]] = {
    "NAME": "; text goes in single quotes",
    "QUOTED_NAME": "; double quotes are for names of headers, text goes in single quotes",
}


def _priority_hint(text: str, token: Token) -> str:
    """For a rule that is nothing but a priority, of a number or a header."""
    if token.type not in ("NUMBER", "NAME", "QUOTED_NAME"):
        return ""
    if not _is_priority_first(text[: token.start_pos]):
        return ""
    return f"; for all messages that is TRUE PRIORITY {_shown(token)}"


def _hint(token: Token, accepted: set[str]) -> str:
    if token.type in RESERVED_WORDS and "NAME" in accepted:
        return f'; a header of that name is written "{token.value}"'
    return _HINTS.get(token.type, "") if "STRING" in accepted and "NAME" not in accepted else ""
