"""`--set KEY=VALUE`: values laid over a recipe's data, typed as YAML types them."""

import copy
from collections.abc import Iterable
from typing import Any

from g4tool.recipe import document as documents
from g4tool.recipe.document import Document, Problem, RecipeError


def overlay(document: Document, settings: Iterable[str]) -> Document:
    """`document` with `settings` laid over it, not yet checked."""
    data = copy.deepcopy(document.data)
    origins = dict(document.origins)
    problems = []
    for setting in settings:
        where = f"--set {setting}"
        try:
            keys, value = _split(setting)
            _put(data, keys, value)
        except ValueError as error:
            problems.append(Problem(where, (), str(error)))
            continue
        path = tuple(int(key) if key.isdigit() else key for key in keys)
        origins = {known: at for known, at in origins.items() if known[: len(path)] != path}
        for length in range(1, len(path)):
            origins.setdefault(path[:length], where)
        origins[path] = where
    if problems:
        raise RecipeError(problems)
    return Document(data, origins, document.problems)


def _split(setting: str) -> tuple[list[str], Any]:
    key, equals, text = setting.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ValueError("write KEY=VALUE, such as quantize.group_size=128")
    return keys, documents.value(text)


def _put(data: Any, keys: list[str], value: Any) -> None:
    inside = data
    for number, key in enumerate(keys):
        last = number == len(keys) - 1
        at = ".".join(keys[:number])
        if isinstance(inside, list):
            if not key.isdigit() or int(key) >= len(inside):
                raise ValueError(f"{at} is a list of {len(inside)}: {key} is none of its numbers")
            place: Any = int(key)
        elif isinstance(inside, dict):
            place = key
            if not last and inside.get(key) is None:
                inside[key] = {}
        else:
            raise ValueError(f"{at} is a single value, it has no key {key}")
        if last:
            inside[place] = value
        else:
            inside = inside[place]
