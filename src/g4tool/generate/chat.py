"""A conversation to a prompt, through the chat template that comes with the checkpoint.

A template is a foreign program: it runs in a sandbox (see there), and whatever goes wrong in it
becomes one sentence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from g4tool.errors import G4Error
from g4tool.generate.files import read_json
from g4tool.generate.sandbox import LimitError, RefusedError, Sandbox
from g4tool.generate.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}, or whatever else the template reads."""

TRUSTED_ROLES = ("system", "developer", "assistant", "model")
"""Who may write control tokens: the operator (`<|think|>`) and the model itself."""


class ChatTemplate:
    """A compiled chat template. Raises G4Error when its source is no valid template."""

    def __init__(self, source: str, where: str = "chat template") -> None:
        self._where = where
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.compile_counted(source)
        except jinja2.TemplateSyntaxError as error:
            raise G4Error(f"{where}, line {error.lineno}: {_short(error.message)}.") from error
        except Exception as error:  # jinja2 leaves some checks to Python's compiler, depth to none
            raise G4Error(f"{where} is no valid chat template ({_named(error)}).") from error

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
            return self._sandbox.render(self._template, variables)
        except RefusedError as error:
            raise G4Error(f"{self._where} refuses the conversation: {_short(error)}.") from error
        except LimitError as error:
            raise G4Error(f"{self._where} runs away: {error}.") from error
        except jinja2.exceptions.SecurityError as error:
            raise G4Error(f"{self._where} tries to leave its sandbox: {_short(error)}.") from error
        except Exception as error:  # foreign code: any error of Python may come out of it
            raise G4Error(f"{self._where} failed on the conversation ({_named(error)}).") from error


def load_chat_template(folder: Path) -> ChatTemplate:
    """The folder's template: chat_template.jinja, else the one in tokenizer_config.json.

    Raises G4Error when there is none, as for models that are not instruction-tuned.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8-sig"), str(file))
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


def _named(error: Exception) -> str:
    return _short(f"{type(error).__name__}: {error}").rstrip(": ")


def _short(text: object) -> str:
    """On one line, and no longer than one can read."""
    return " ".join(str(text).split())[:300]
