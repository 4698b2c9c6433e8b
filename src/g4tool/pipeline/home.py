"""Where the store lives and which layout it has."""

import errno
import json
import os
import sys
from pathlib import Path

from g4tool.errors import G4Error, UsageError
from g4tool.files import write_json

LAYOUT = 1


def default_home() -> Path:
    """G4_HOME, or the folder `g4` in the user's cache folder (XDG_CACHE_HOME honoured)."""
    if given := os.environ.get("G4_HOME"):
        return user_path(Path(given)).absolute()
    if sys.platform == "darwin":
        return user_path(Path("~/Library/Caches/g4"))
    # The XDG specification says that a relative path is invalid and must be ignored.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else user_path(Path("~/.cache"))) / "g4"


def user_path(path: Path) -> Path:
    """`path` with a leading ~ or ~name replaced. Raises UsageError for what can be no path here."""
    try:
        expanded = path.expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: there is no home folder for {path.parts[0]}.") from None
    try:
        expanded.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{str(path)[:60]}... cannot be a path: it is too long.") from None
    return expanded


def open_home(home: Path) -> Path:
    """Make `home` where it is missing and check that this version can use it.

    Returns the absolute folder. One that is whole may be read-only. Raises G4Error when it cannot
    be made or is newer, UsageError when it can be no path.
    """
    home = user_path(home).absolute()
    advice = "give another folder with --home or G4_HOME."
    try:
        for folder in ("artifacts", "locks", "trash"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        mark = home / "store.json"
        if not mark.exists():
            if not os.access(home, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "no permission to write")
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
