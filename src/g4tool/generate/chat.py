"""A conversation to a prompt, through the chat template that comes with the checkpoint.

A template is a foreign program. It runs in jinja2's sandbox, with what `transformers` offers
templates and no more, and whatever goes wrong in it becomes one sentence.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from g4tool.errors import G4Error
from g4tool.generate.files import read_json
from g4tool.generate.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}, or whatever else the template reads."""

TRUSTED_ROLES = ("system", "developer", "assistant", "model")
"""Who may write control tokens: the operator (`<|think|>`) and the model itself."""


class ChatTemplate:
    """A compiled chat template. Raises G4Error when its source is no valid template."""

    def __init__(self, source: str, where: str = "chat template") -> None:
        self._where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise G4Error(f"{where}, line {error.lineno}: {error.message}.") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> str:
        """The prompt's text, BOS included if the template writes it.

        `names` are the special tokens by role (`Tokenizer.names`). Raises G4Error with the
        template's own objection, or with what went wrong in it.
        """
        variables = {
            **(names or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
        }
        try:
            return self._template.render(variables)
        except _Refused as error:
            raise G4Error(f"{self._where} refuses the conversation: {error}.") from error
        except jinja2.exceptions.SecurityError as error:
            raise G4Error(f"{self._where} tries to leave its sandbox: {error}.") from error
        except Exception as error:  # foreign code: any error of Python may come out of it
            raise G4Error(
                f"{self._where} failed on the conversation ({type(error).__name__}: {error})."
            ) from error


def load_chat_template(folder: Path) -> ChatTemplate:
    """The folder's template: chat_template.jinja, else the one in tokenizer_config.json.

    Raises G4Error when there is none, as for models that are not instruction-tuned.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise G4Error(f"{file} cannot be read ({error}); fetch it again.") from error
    config = folder / "tokenizer_config.json"
    source = read_json(config).get("chat_template")
    if isinstance(source, list):
        entries = {e.get("name"): e.get("template") for e in source if isinstance(e, dict)}
        source = entries.get("default")
    if not isinstance(source, str):
        raise G4Error(
            f"{folder} has no chat template (chat_template.jinja): give the text as a raw prompt,"
            " or take an instruction-tuned model, whose name ends in -it."
        )
    return ChatTemplate(source, f"{config}: chat_template")


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    enable_thinking: bool = False,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of the conversation, BOS exactly once, ready for the model's answer.

    Control tokens typed in a user's or a tool's message stay plain characters: they cannot end
    the turn, forge another or open a channel. The roles of TRUSTED_ROLES may write them.
    """
    guarded = [m if m.get("role") in TRUSTED_ROLES else _guarded(tokenizer, m) for m in messages]
    text = template.render(
        guarded,
        enable_thinking=enable_thinking,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        names=tokenizer.names,
    )
    return tokenizer.encode(text, bos=True)


def _guarded(tokenizer: Tokenizer, value: Any) -> Any:
    if isinstance(value, str):
        return tokenizer.guard(value)
    if isinstance(value, Mapping):
        return {key: _guarded(tokenizer, inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guarded(tokenizer, inner) for inner in value]
    return value


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


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
