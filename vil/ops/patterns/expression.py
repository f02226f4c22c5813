"""Parse patterns given as text, such as "axial | local:5 - dilated:2".

The grammar is:

    expression   term, or expressions joined by `|`, `&` or `-`, with Python's precedence
    term         (expression), or NAME[:ARGUMENT,...]
    argument     VALUE or KEY=VALUE; a value is a number, a word, or text in quotes
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vil.ops.patterns import PATTERNS
from vil.ops.patterns.base import OPERATORS, Pattern, combine
from vil.utils.lookup import lookup

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w./]))|(?P<quoted>'[^']*'|"[^"]*")"""
    r"""|(?P<word>[\w./~\\]+)|(?P<sign>[-|&():,=]))"""
)
END = "the end"


class Token(NamedTuple):
    """A lexical token of a pattern text.

    kind: "number", "quoted", "word" or "sign" (an operator or a punctuation mark). text: its
    characters, with the quotes. column: its position in the pattern text, counted from 1.
    """

    kind: str
    text: str
    column: int


def parse_pattern(text: str) -> Pattern:
    """Return the pattern that a text such as "axial | local:5" describes.

    Raises ValueError for a text that does not parse, an unknown name, and arguments that the
    pattern does not accept.
    """
    return _Parser(text).parse()


def make_pattern(name: str, /, *arguments: Any, **options: Any) -> Pattern:
    """Build a pattern by calling the class or function that is registered as `name`.

    Raises ValueError for an unknown name, for arguments that the class or function does not accept,
    and if its result is not a pattern.
    """
    function = PATTERNS.load(name)
    signature = inspect.signature(function)
    parameters = signature.parameters
    if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            lookup(parameters, key, f"argument of {name}")
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}; {name} accepts {', '.join(parameters)}") from None
    pattern = function(*arguments, **options)
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{name} must return a vil.ops.patterns.Pattern, got {pattern!r}")
    return pattern


class _Parser:
    """A recursive descent parser of pattern text. `position` is the index of the next token."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.tokens = list(self._tokenize())

    def parse(self) -> Pattern:
        pattern = self._expression(1)
        if self._next().text != END:
            raise self._error("expected '|', '&' or '-'")
        return pattern

    def _tokenize(self) -> list[Token]:
        tokens, at = [], 0
        while self.text[at:].strip():
            match = _TOKEN.match(self.text, at)
            if not match:
                column = at + 1 + len(self.text[at:]) - len(self.text[at:].lstrip())
                raise self._at(column, f"unexpected {self.text[column - 1]!r}")
            kind = str(match.lastgroup)  # never None: each alternative is a group
            tokens.append(Token(kind, match[kind], match.start(kind) + 1))
            at = match.end()
        return [*tokens, Token("sign", END, len(self.text) + 1)]

    def _expression(self, precedence: int) -> Pattern:
        """Parse terms joined by operators of precedence `precedence` or higher, left to right."""
        left = self._term()
        while (sign := self._next()).text in OPERATORS:
            strength = OPERATORS[sign.text].precedence
            if strength < precedence:
                break
            self.position += 1
            right = self._expression(strength + 1)
            left = self._checked(sign, combine, sign.text, left, right)
        return left

    def _term(self) -> Pattern:
        token = self._take()
        if token.text == "(" and token.kind == "sign":
            pattern = self._expression(1)
            self._expect(")")
            return pattern
        if token.kind != "word":
            self.position -= 1
            raise self._error("expected the name of a pattern")
        arguments, options = self._arguments() if self._next().text == ":" else ([], {})
        return self._checked(token, make_pattern, token.text, *arguments, **options)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Parse the arguments after a pattern's name. Return ([VALUE, ...], {KEY: VALUE, ...})."""
        arguments, options = [], {}
        while self._next().text in (":" if not arguments and not options else ","):
            self.position += 1
            value = self._value()
            if self._next().text == "=":
                self.position += 1
                options[str(value)] = self._value()
            elif options:
                raise self._error("values without a KEY must come before KEY=VALUE: expected '='")
            else:
                arguments.append(value)
        return arguments, options

    def _value(self) -> Any:
        token = self._take()
        if token.text == "-" and self._next().kind == "number":
            return -self._value()
        if token.kind == "sign":
            self.position -= 1
            raise self._error("expected a value")
        if token.kind == "quoted":
            return token.text[1:-1]
        if token.kind == "word":
            return token.text
        return int(token.text) if token.text.isdigit() else float(token.text)

    def _next(self) -> Token:
        return self.tokens[self.position]

    def _take(self) -> Token:
        self.position += 1
        return self.tokens[self.position - 1]

    def _expect(self, text: str) -> None:
        if self._take().text != text:
            self.position -= 1
            raise self._error(f"expected {text}")

    def _checked(self, token: Token, function: Callable, /, *arguments: Any, **options: Any) -> Any:
        """Call a function. If it raises ValueError, add the position of `token` to the message."""
        try:
            return function(*arguments, **options)
        except ValueError as error:
            raise self._at(token.column, str(error)) from None

    def _error(self, expected: str) -> ValueError:
        token = self._next()
        found = END if token.text == END else repr(token.text)
        return self._at(token.column, f"{expected}, found {found}")

    def _at(self, column: int, problem: str) -> ValueError:
        rest = self.text[column - 1 :]
        place = f"column {column}, before {rest!r}" if rest else END
        return ValueError(f"pattern {self.text!r}, at {place}: {problem}")
