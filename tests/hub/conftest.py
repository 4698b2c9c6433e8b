"""A Hub of our own for every test that asks, and a library that retries without sleeping."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from tests.hub.server import TOKEN, Hub, serving


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the library would have made between tries, in seconds."""
    made: list[float] = []
    clock = SimpleNamespace(sleep=made.append, time=time.time)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", clock)
    return made


@pytest.fixture
def empty_hub(monkeypatch: pytest.MonkeyPatch, sleeps: list[float]) -> Iterator[Hub]:
    """A Hub without repositories, that this process is logged in to and takes for the only one."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub
