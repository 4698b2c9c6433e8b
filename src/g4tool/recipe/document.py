"""A YAML file as plain data (mappings, lists, scalars), with the line of every key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from g4tool.errors import UsageError

MOST_CHARACTERS = 1 << 17
"""Of a recipe. Reading YAML takes time in proportion, and the longest have some hundred rules."""

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists."""


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is ("g4.yaml:7", "--set a=1"), at which key, and what is wrong."""

    where: str
    keys: Keys
    message: str

    def __str__(self) -> str:
        at = ".".join(map(str, self.keys))
        return f"{self.where}: {at}: {self.message}" if at else f"{self.where}: {self.message}"


class RecipeError(UsageError):
    """Every mistake found in a recipe, one line each."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


@dataclass(frozen=True)
class Document:
    """A recipe's data before it is checked.

    `origins` says where each key was set; `problems` are mistakes that left the YAML readable.
    """

    data: dict[str, Any]
    origins: dict[Keys, str]
    problems: tuple[Problem, ...] = ()

    def origin(self, keys: Keys) -> str:
        """Where `keys`, or the nearest thing around it, was set."""
        while keys and keys not in self.origins:
            keys = keys[:-1]
        return self.origins.get(keys, "recipe")


def read(path: Path, shown: str | None = None) -> Document:
    """Read a YAML file; `shown` is its name in messages. Raises RecipeError, UsageError."""
    name = shown or str(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise UsageError(f"recipe {name} cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"recipe {name} is not UTF-8 text: {error.reason}.") from error
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse YAML text; `name` stands for the file in messages.

    Raises RecipeError for what is not YAML or not a mapping.
    """
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(
            [Problem(name, (), f"longer than {MOST_CHARACTERS} characters, which no recipe is")]
        )
    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise RecipeError([Problem(name, (), "the recipe is empty; it needs name and model")])
        if not isinstance(root, yaml.MappingNode):
            what = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise RecipeError(
                [Problem(f"{name}:{_line(root)}", (), f"{what}; a recipe is a mapping of keys")]
            )
        origins: dict[Keys, str] = {(): name}
        problems: list[Problem] = []
        data = _plain(loader, root, (), name, origins, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise RecipeError([Problem(where, (), f"not valid YAML: {error.problem}")]) from error
    except yaml.reader.ReaderError as error:
        where = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        reason = f"the character U+{ord(text[error.position]):04X} is not allowed"
        raise RecipeError([Problem(where, (), f"not valid YAML: {reason}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RecipeError([Problem(name, (), f"not valid YAML: {reason}")]) from error
    finally:
        if loader:
            loader.dispose()
    return Document(data, origins, tuple(problems))


def value(text: str) -> Any:
    """A value as YAML types it: 128, true, a list. Raises ValueError with the reason."""
    try:
        document = parse(f"value: {text}", "")
    except RecipeError as error:
        raise ValueError(error.problems[0].message) from error
    if document.problems:
        raise ValueError(document.problems[0].message)
    if list(document.data) != ["value"]:
        raise ValueError("not one YAML value")
    return document.data["value"]


_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a recipe needs none, and they can make a small file endless."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not taken in a recipe", event.start_mark
            )
        return super().compose_node(parent, index)


def _plain(
    loader: _Loader,
    node: yaml.Node,
    keys: Keys,
    name: str,
    origins: dict[Keys, str],
    problems: list[Problem],
) -> Any:
    if isinstance(node, yaml.CollectionNode) and node.tag not in _TAGS:
        problems.append(Problem(f"{name}:{_line(node)}", keys, f"the tag {node.tag} is not taken"))
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            origins[(*keys, index)] = f"{name}:{_line(child)}"
            items.append(_plain(loader, child, (*keys, index), name, origins, problems))
        return items
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_object(node, deep=True)
        except yaml.YAMLError:
            raise
        except ValueError as error:  # such as the date 2026-99-99
            reason = str(error)
        except Exception:  # the library looks a word up, or takes it apart, without a check
            reason = f"{node.value!r} is no {node.tag.rpartition(':')[2]}"
        problems.append(Problem(f"{name}:{_line(node)}", keys, f"not a value: {reason}"))
        return None
    found: dict[str, Any] = {}
    for key_node, child in node.value:
        where = f"{name}:{_line(key_node)}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(where, keys, "a key must be a word"))
            continue
        key = key_node.value
        if key in found:
            problems.append(Problem(where, (*keys, key), "this key is set twice"))
            continue
        origins[(*keys, key)] = where
        found[key] = _plain(loader, child, (*keys, key), name, origins, problems)
    return found


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
