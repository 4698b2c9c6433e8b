"""Models of a variant's shape with random quantized weights, made on the device they are for."""

import torch
from torch import Tensor, nn

from g4tool.kernels.int4 import Int4ExpertLinear, Int4Linear
from g4tool.kernels.int8 import Int8Embedding
from g4tool.model.config import TextConfig
from g4tool.model.embedding import Embedding
from g4tool.model.moe import ExpertLinear
from g4tool.model.text import TextModel

BF16 = torch.bfloat16


def random_int4(*shape: int, group: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """qdata, scale and zero of a random weight [..., N, K]."""
    *lead, count, columns = shape
    qdata = torch.randint(0, 256, (*lead, count, columns // 2), dtype=torch.uint8, device=device)
    per_group = (*lead, columns // group, count)
    # Of the spread that trained matrices have, so that activations stay in range.
    scale = (torch.rand(per_group, device=device) + 0.5) * 0.2 * columns**-0.5
    zero = torch.randn(per_group, device=device) + 7.5
    return qdata, scale.to(BF16), zero.to(BF16)


def random_model(config: TextConfig, group: int = 32, device: str = "cuda") -> TextModel:
    """A bf16 model whose matrices are int4 leaves; embeddings and output head are int8."""
    with torch.device("meta"):
        model = TextModel(config).to(BF16)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "router" not in path:
            own = group if module.in_features % group == 0 else 32
            weight = random_int4(*module.weight.shape, group=own, device=device)
            model.set_submodule(path, Int4Linear(*weight))
        elif isinstance(module, ExpertLinear):
            weight = random_int4(*module.weight.shape, group=32, device=device)
            model.set_submodule(path, Int4ExpertLinear(*weight))
        elif isinstance(module, Embedding):
            rows, dim = module.weight.shape
            codes = torch.randint(-127, 128, (rows, dim), dtype=torch.int8, device=device)
            scale = torch.full((rows, 1), 0.01 * dim**-0.5, device=device).to(BF16)
            model.set_submodule(path, Int8Embedding(codes, scale))
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.rand(parameter.shape, device=device) * 0.5 + 0.75
            if parameter.dim() > 1:
                value = torch.randn(parameter.shape, device=device) * parameter.shape[-1] ** -0.5
            if path.endswith("q_norm"):
                # Else scores are so far apart that rounding decides which one counts.
                value *= parameter.shape[-1] ** -0.5
            setattr(module, name, nn.Parameter(value.to(BF16), requires_grad=False))
        if "layer_scalar" in module._buffers:
            module._buffers["layer_scalar"] = torch.ones(1, device=device, dtype=BF16)
    return model.eval()
