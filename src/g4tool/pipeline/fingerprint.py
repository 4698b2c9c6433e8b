"""What an artifact's identity is: a SHA-256 over all that shapes its bytes, and nothing else."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

Json = Any
"""A value JSON can hold: None, bool, int, float, str, list or str-keyed dict of these."""


def canonical_json(value: Json) -> str:
    """`value` as the one JSON text that stands for it: sorted keys, no spaces, no NaN.

    Raises TypeError or ValueError on what JSON cannot hold exactly, non-text keys included: `json`
    would write the key 1 as "1", and two different values would get one text.
    """
    _check(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _check(value: Json) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key that is not text: {key!r}")
            _check(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item)


def stage_identity(
    name: str,
    version: int,
    parameters: Mapping[str, Json],
    environment: Mapping[str, Json],
    inputs: Iterable[str],
) -> str:
    """Identity of a stage's artifact, 64 hex digits; `inputs` are identities, in order."""
    return _digest(
        {
            "stage": name,
            "version": version,
            "parameters": dict(parameters),
            "environment": dict(environment),
            "inputs": list(inputs),
        }
    )


def source_identity(hashes: Mapping[str, str]) -> str:
    """Identity of given files (relative name -> SHA-256), wherever they lie."""
    return _digest({"stage": "source", "files": dict(hashes)})


def _digest(value: Json) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
