"""A transfer that has stopped is cut, so that it can be taken up again where it was.

A read that times out is the library's own business. A connection over which a few bytes drip does
not time out, and would be waited for without end.
"""

import threading
import time
from collections.abc import Callable

from g4tool.progress import Progress, Report

PATIENCE = 900.0
"""Seconds without a block (10 MB) of any file: less than 11 kB/s."""
_TRIES = 5


def taken_up_again(
    transfer: Callable[[Report], None], report: Report, patience: float = PATIENCE
) -> None:
    """Run `transfer` with a report; where it is not called for `patience` seconds, every connection
    is closed and `transfer`, which then fails, is run anew, a few times."""
    for left in reversed(range(_TRIES)):
        watch = _Watch(report, patience)
        try:
            transfer(watch.report)
            return
        except Exception:
            if not (left and watch.cut):
                raise
        finally:
            watch.stop()


class _Watch:
    def __init__(self, report: Report, patience: float) -> None:
        self.cut = False
        self._report = report
        self._patience = patience
        self._heard = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def report(self, step: Progress) -> None:
        self._heard = time.monotonic()
        self._report(step)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        from huggingface_hub import close_session

        while not self._done.wait(min(1.0, self._patience / 4)):
            if time.monotonic() - self._heard > self._patience:
                self.cut = True
                self._heard = time.monotonic()
                close_session()
