"""Where a chat template runs: jinja2's sandbox, with what `transformers` offers templates.

The sandbox keeps a template from Python's insides; the limits here keep it from running on for
ever. They bound the turns of its `for` loops, repetition (`'a' * n`), powers, and the text it
writes. A filter or a string method that builds one huge value is not bounded but by memory.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_TURNS = 1_000_000
"""Of all `for` loops in one rendering together."""

MOST_CHARACTERS = 1 << 26
"""Of the rendered text, and of one repetition. Beyond any model's context."""

_MOST_BITS = 1 << 16


class RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


class LimitError(jinja2.TemplateError):
    """The template asked for more than a conversation can need."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates and renders them, one at a time, within the limits."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self._turns = 0
        self.filters["tojson"] = _tojson
        self.filters["counted"] = self._counted
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "namespace": _Namespace,
        }

    def compile_counted(self, source: str) -> jinja2.Template:
        """The template, its loops counted. Raises whatever jinja2 and Python's compiler raise."""
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(
                loop.iter, "counted", [], [], None, None, lineno=loop.lineno, environment=self
            )
        return self.from_string(tree)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """The text of one of this sandbox's templates. Raises whatever comes out of it."""
        self._turns = 0
        pieces: list[str] = []
        length = 0
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_CHARACTERS:
                raise LimitError(f"it writes more than {MOST_CHARACTERS} characters")
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Products and powers, refused where their size alone would stop the machine."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check(left.bit_length() * right, _MOST_BITS, "bits in a power")
        else:
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    _check(len(value) * times, MOST_CHARACTERS, "items in a repetition")
        return super().call_binop(context, operator, left, right)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._turns += 1
            _check(self._turns, MOST_TURNS, "turns in its loops")
            yield item


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise LimitError(f"it asks for more than {most} {what}")


class _Namespace(Namespace):
    # An underscored attribute would answer Python itself (`__call__`), past the sandbox's checks.
    def __init__(*args: Any, **attributes: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **attributes):
            _check_attribute(name)
        Namespace.__init__(self, *rest, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


class _Generation(Extension):
    """`{% generation %}`: marks the model's words for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise RefusedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
