"""The executorch package: imported where it is used, with the noise of its import left out."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from g4tool.errors import G4Error

INSTALL = "pip install 'g4tool[executorch]'"


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of libraries, nor what their C++ writes to standard error by itself.

    An error still comes as an exception.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    void = os.open(os.devnull, os.O_WRONLY)
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        os.dup2(void, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(void)
        logging.disable(level)


def load_runtime() -> Any:
    """The runtime with its kernels. Raises G4Error where the package is missing or broken."""
    try:
        with quiet():
            from executorch.runtime import Runtime

            return Runtime.get()
    except ImportError as error:
        raise G4Error(f"running an exported program needs executorch: {INSTALL}.") from error


def require_exporter() -> None:
    """Raises G4Error where the package that lowers programs is missing."""
    try:
        with quiet():
            import executorch.exir  # noqa: F401
    except ImportError as error:
        raise G4Error(f"exporting needs executorch: {INSTALL}.") from error
