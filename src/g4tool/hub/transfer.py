"""huggingface_hub's progress bars turned into this package's reports."""

import threading
from typing import Any

from g4tool.progress import Progress, Report


def bar_class(job: str, there: int, total: int, report: Report) -> type[Any]:
    """A tqdm that draws nothing and reports bytes: `there` of `total` before the first arrives.

    The library keeps several bars over the same bytes (received, written) and one that counts
    files; the furthest of the bars in bytes is reported.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    furthest = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            with lock:
                self.n += n or 0
                if self._bytes and self.n > furthest:
                    furthest = int(self.n)
                    report(Progress(job, min(there + furthest, total), total, "bytes"))

    return Bar
