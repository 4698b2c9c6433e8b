"""Typed access to a JSON table with defaults; what is wrong is said with file and key."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from g4tool.errors import G4Error

# No size of a model is larger; what is would only be found out by filling the memory.
MOST = 2**31

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: object) -> str:
    """A value's repr for a message, shortened where it is long or deep."""
    return _SHORT.repr(value)


class Settings:
    """A table of `where` (a file's name) whose keys are named with `prefix` in messages."""

    def __init__(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any], where: str, prefix: str = ""
    ) -> None:
        self.raw = raw
        self._defaults = defaults
        self._where = where
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the table itself has the key."""
        return key in self.raw

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value, else the table's default, else `default`."""
        return self.raw.get(key, self._defaults.get(key, default))

    def size(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST
    ) -> int:
        """An integer from `least` to `most`; null counts as 0 where 0 is allowed."""
        value = self.get(key, default)
        if value is None:
            if least <= 0 and key in self.raw:
                return 0
            raise self.error(key, "is missing")
        if type(value) is not int or value < least:
            raise self.error(key, f"is {shown(value)}, not an integer of at least {least}")
        if value > most:
            raise self.error(key, f"is {shown(value)}, more than {most}, the most g4 reads")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self.error(key, f"is {shown(value)}, not a number above zero")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, f"is {shown(value)}, not true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A JSON object; null counts as an empty one."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, f"is {shown(value)}, not a table")
        return value

    def inner(self, key: str, name: str, entry: Any) -> "Settings":
        """The table `entry` that stands at `key`.`name`; it has no defaults."""
        if not isinstance(entry, dict):
            problem = "is missing" if entry is None else f"is {shown(entry)}, not a table"
            raise self.error(f"{key}.{name}", problem)
        return Settings(entry, {}, self._where, f"{self._prefix}{key}.{name}.")

    def error(self, key: str, problem: str) -> G4Error:
        """The error that says `problem` of `key`."""
        return G4Error(f"{self._where}: {self._prefix}{key} {problem}.")
