"""The mark of tests that need somebody's source trees of NxD Inference."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark `nxdi`."""
    config.addinivalue_line(
        "markers", "nxdi: runs the port on NxD Inference's CPU mode; needs its source trees"
    )
