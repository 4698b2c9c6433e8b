"""A recipe's data against its model: every mistake, in words, with the nearest right key."""

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from g4tool.recipe.document import Document, Keys, Problem, RecipeError
from g4tool.recipe.model import Recipe

_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
}


def check(document: Document) -> Recipe:
    """The recipe in `document`. Raises RecipeError naming all mistakes, in the keys' order."""
    problems = list(document.problems)
    told = {problem.keys for problem in problems}
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as error:
        found = (_problem(document, each) for each in error.errors(include_url=False))
        problems += [problem for problem in found if problem.keys not in told]
    if problems:
        order = {keys: number for number, keys in enumerate(document.origins)}
        raise RecipeError(sorted(problems, key=lambda problem: _place(problem.keys, order)))
    return recipe


def nearest(word: str, choices: Iterable[str]) -> str:
    """A phrase that helps who wrote `word`: the choice most like it, or all of them."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _place(keys: Keys, order: dict[Keys, int]) -> int:
    while keys and keys not in order:
        keys = keys[:-1]
    return order.get(keys, 0)


def _problem(document: Document, error: ErrorDetails) -> Problem:
    keys: Keys = tuple(error["loc"])
    return Problem(document.origin(keys), keys, _message(keys, error))


def _message(keys: Keys, error: ErrorDetails) -> str:
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key; {nearest(str(keys[-1]), _known_keys(keys[:-1]))}"
    if kind == "missing":
        return "this key is needed"
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        text = f"{_show(given)} is not one of {', '.join(choices)}"
        word = given if isinstance(given, str) else ""
        close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
        return f"{text}; did you mean {close[0]}?" if close else text
    if kind == "value_error":
        return str(context["error"])
    if kind == "greater_than":
        return f"{_show(given)} is not greater than {context['gt']}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_pattern_mismatch":
        wanted = "owner/name" if keys[-1] == "repo" else "letters, digits, dots, hyphens"
        return f"{_show(given)} is not of the form {wanted}"
    if kind in _WANTED:
        quotes = "; put quotes around it" if kind == "string_type" and _is_scalar(given) else ""
        return f"wants {_WANTED[kind]}, not {_show(given)}{quotes}"
    return f"{_show(given)}: {error['msg']}"


def _known_keys(keys: Keys) -> list[str]:
    model: type[BaseModel] | None = Recipe
    for key in keys:
        if model is None:
            return []
        if isinstance(key, int):
            continue
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        model = _model_in(fields[key].annotation) if key in fields else None
    return [f.alias or name for name, f in model.model_fields.items()] if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each))), None)


def _is_scalar(given: Any) -> bool:
    return given is not None and not isinstance(given, list | dict)


def _show(given: Any) -> str:
    if given is None:
        return "nothing"
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, int) and given.bit_length() > 64:  # Python may refuse to write it out
        return "a huge number"
    if isinstance(given, dict):
        return "a mapping"
    if isinstance(given, list):
        return "a list"
    return repr(given) if isinstance(given, str) else str(given)
