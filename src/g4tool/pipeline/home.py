"""Where the store lives and which layout it has."""

import json
import os
import sys
from pathlib import Path

from g4tool.errors import G4Error
from g4tool.files import write_json

LAYOUT = 1


def default_home() -> Path:
    """G4_HOME, or the folder `g4` in the user's cache folder (XDG_CACHE_HOME honoured)."""
    if given := os.environ.get("G4_HOME"):
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "g4"
    # The XDG specification says that a relative path is invalid and must be ignored.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "g4"


def open_home(home: Path) -> Path:
    """Make `home` where it is missing and check that this version can read and write it.

    Returns the absolute folder. Raises G4Error when it cannot be written or is newer.
    """
    home = home.expanduser().absolute()
    advice = "give another folder with --home or G4_HOME."
    try:
        for folder in ("artifacts", "locks", "trash"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        if not os.access(home, os.W_OK | os.X_OK) or not os.access(home / "artifacts", os.W_OK):
            raise PermissionError(13, "no permission to write")
        mark = home / "store.json"
        if not mark.exists():
            write_json(mark, {"layout": LAYOUT})
    except OSError as error:
        raise G4Error(
            f"the store's folder {home} cannot be written ({error.strerror or error}): {advice}"
        ) from error
    try:
        layout = json.loads(mark.read_text())["layout"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise G4Error(f"{mark} is not a store's layout file: {advice}") from error
    if layout != LAYOUT:
        raise G4Error(
            f"the store {home} has layout {layout}, this version of g4 reads layout {LAYOUT}: "
            f"update g4, or {advice}"
        )
    return home
