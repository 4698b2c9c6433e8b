"""What one rank is told when another has gone."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from g4tool.errors import G4Error
from g4tool.parallel.group import World

# As gloo says it.
_LOST = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer "
    "[127.0.0.1]:23682. This is typically caused by a remote worker hanging.\nMore."
)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_a_rank_that_is_gone(collective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError(_LOST)

    monkeypatch.setattr(dist, collective, fails)
    words = r"another rank .* \(Connection closed by peer \[127\.0\.0\.1\]:23682\)"
    calls = {"all_reduce": World(0, 2).sum, "all_gather": partial(World(0, 2).gather, sizes=[2, 1])}
    with pytest.raises(G4Error, match=words):
        calls[collective](torch.ones(2))
