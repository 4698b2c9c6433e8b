"""What of this machine shapes an artifact's bytes, told without importing torch."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from g4tool.errors import UsageError


def library_version(name: str) -> str:
    """Installed version of a distribution, "none" when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def choose_device(wanted: str | None) -> str:
    """`wanted` ("cpu", "cuda", "cuda:1"), or CUDA where there is a usable card, else CPU.

    torch takes seconds to import, so it is asked only where an NVIDIA driver is loaded.
    Raises UsageError for a device that is not there.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted is not None and wanted.partition(":")[0] != "cuda":
        raise UsageError(f"--device {wanted}: give cpu or cuda (cuda:1 for the second card).")
    if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia").exists():
        import torch

        if torch.cuda.is_available():
            return _check_index(wanted or "cuda", torch.cuda.device_count())
    if wanted is None:
        return "cpu"
    raise UsageError(f"--device {wanted}: this machine has no usable CUDA device; use cpu.")


def device_class(device: str) -> str:
    """The kind of arithmetic `device` does: results may differ between kinds in the last bits."""
    if device == "cpu":
        return f"cpu {platform.machine()}"
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor}"


def _check_index(device: str, count: int) -> str:
    _, _, index = device.partition(":")
    if index and not (index.isdigit() and int(index) < count):
        raise UsageError(f"--device {device}: this machine has {count} CUDA device(s).")
    return device
