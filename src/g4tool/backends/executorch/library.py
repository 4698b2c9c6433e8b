"""The executorch package: imported where it is used, with the noise of its import left out."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from g4tool.errors import G4Error

INSTALL = "pip install 'g4tool[executorch]'"


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of libraries, nor what their C++ writes to standard error by itself.

    What Python writes there, such as a progress bar, is still seen; an error still comes as an
    exception.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    void = os.open(os.devnull, os.O_WRONLY)
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    stderr = sys.stderr
    seen = open(kept, "w", encoding=stderr.encoding, errors=stderr.errors, closefd=False)  # noqa: SIM115
    try:
        os.dup2(void, 2)
        if _writes_to(stderr, 2):
            sys.stderr = seen
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stderr = stderr
        sys.stderr.flush()
        seen.close()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(void)
        logging.disable(level)


@contextmanager
def short_history() -> Iterator[None]:
    """Lowering without copies of every node's whole origin at every pass: a tenth of its time.

    What torch notes about where a node came from is never changed, so it can be shared.
    """
    from torch.fx.traceback import NodeSource

    NodeSource.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del NodeSource.__deepcopy__  # type: ignore[attr-defined]


def _writes_to(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return False


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
