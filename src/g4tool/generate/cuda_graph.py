"""Decoding as a CUDA graph: one recorded step, from the last id to the next, replayed a token.

Ids and positions stay on the device, and the host reads each id while the next step already runs.
So a step may have run that nobody asked for, when an end id comes. It does no harm: it wrote only
to the position that the next chunk will write to.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from g4tool.generate.cuda_step import decode_hidden
from g4tool.generate.sampler import Sampling, choose, make_generator
from g4tool.kernels.triton_attention import chunk_attention
from g4tool.model.attention import Attention, attend
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


def use_kernels(model: TextModel) -> None:
    """Lets chunks of several tokens attend through Triton, in place of torch's general kernel."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = _attend


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    run = chunk_attention if len(queries) == 1 and queries.is_cuda else attend
    return run(queries, keys, values, mask)


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
        hidden = decode_hidden(model, ids.clamp(min=0), position)
        ids.copy_(choose(model.logits(hidden)[:, 0], sampling, generator)[:, None])
        position.add_(1)

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            position.fill_(start)
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    host = torch.empty((1, 1), dtype=torch.int64, pin_memory=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return Recorded(graph, ids, position, generator, host, ready)
