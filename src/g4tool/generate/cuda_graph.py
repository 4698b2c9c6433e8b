"""Decoding as a CUDA graph: the model's own step, from the last id to the next, replayed a token.

Ids and positions stay on the device, and the host reads each id while the next step already runs.
So a step may have run that nobody asked for, when an end id comes. It does no harm: it wrote only
to the position that the next chunk will write to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g4tool.generate.sampler import Sampling, choose, make_generator
from g4tool.kernels.triton_arithmetic import TokenArithmetic, TritonArithmetic
from g4tool.model.arithmetic import use
from g4tool.model.text import TextModel

_WARM_UPS = 2


@dataclass
class Recorded:
    """A recorded step. ids int64 [1, 1] is its input and its output; position int64 [] its own."""

    graph: torch.cuda.CUDAGraph
    ids: Tensor
    position: Tensor
    generator: torch.Generator | None
    host: Tensor
    ready: torch.cuda.Event

    def begin(self, tokens: Tensor, position: int, sampling: Sampling) -> None:
        """Sets the next step's id, int64 [1], and position, and seeds the generator again."""
        self.ids.copy_(tokens.view(1, 1))
        self.position.fill_(position)
        if self.generator is None:
            return
        if sampling.seed is None:
            self.generator.seed()
        else:
            # Not the stream of numbers that the first id was drawn with.
            self.generator.manual_seed((sampling.seed + 1) % 2**63)

    def launch(self) -> None:
        """Starts one step."""
        self.graph.replay()
        self.host.copy_(self.ids, non_blocking=True)
        self.ready.record()

    def take(self, more: bool) -> list[int]:
        """The id that the last launch made; with `more` the next step runs when this returns."""
        self.ready.synchronize()
        ids: list[int] = self.host[0].tolist()
        if more:
            self.launch()
        return ids


def prepare(model: TextModel) -> bool:
    """Gives a model on a CUDA device the kernels' arithmetic; whether it could.

    Not one whose modules carry hooks, as the ranks of a parallel model do, nor float64. The
    caller sees that there is Triton.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    sizes = {layer.head_dim for layer in model.config.layers}
    if model.norm.weight.dtype == torch.float64 or any(s < 16 or s & (s - 1) for s in sizes):
        return False
    use(model, TritonArithmetic())
    return True


def takes(model: object) -> bool:
    """Whether `record` takes this model: one that `prepare` has prepared."""
    return isinstance(model, TextModel) and isinstance(model.arithmetic, TritonArithmetic)


@contextmanager
def _by_token(model: TextModel) -> Iterator[None]:
    """The model running one token at a time."""
    before = model.arithmetic
    use(model, TokenArithmetic(model.norm.weight.dtype))
    try:
        yield
    finally:
        use(model, before)


@torch.no_grad()
def record(model: TextModel, sampling: Sampling, start: int) -> Recorded:
    """Records a step over the model's present cache; the recording holds as long as the cache does.

    `start` is the next position to be written: what the cache holds before it stays.
    """
    device = model.device
    generator = make_generator(replace(sampling, seed=0), device)
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    position = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        # A broken step gives a negative id, and the one behind it has started already.
        hidden = model.hidden(ids.clamp(min=0), position)
        ids.copy_(choose(model.logits(hidden)[:, 0], sampling, generator)[:, None])
        position.add_(1)

    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with _by_token(model):
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                position.fill_(start)
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        with torch.cuda.graph(graph):
            step()
    host = torch.empty((1, 1), dtype=torch.int64, pin_memory=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return Recorded(graph, ids, position, generator, host, ready)
