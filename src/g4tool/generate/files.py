"""The small JSON files that lie beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any

from g4tool.errors import G4Error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} when there is no such file. Raises G4Error when damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise G4Error(f"{path} cannot be read as JSON ({error}); fetch it again.") from error
    except RecursionError as error:
        raise G4Error(f"{path} is nested too deeply to be read; fetch it again.") from error
    if not isinstance(value, dict):
        raise G4Error(f"{path} holds no JSON object; fetch it again.")
    return value
