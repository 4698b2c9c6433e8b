"""8 bit, symmetric: one bf16 scale for each group of a row, or for the row."""

import torch
from torch import Tensor

from g4tool.quantize.pack import Codes

_SMALLEST = 2.0**-133  # the first bf16 above zero


def solve(rows: Tensor, group: int) -> Codes:
    """Quantize rows [R, K] in groups of `group` columns (K: one group a row); codes -127..127.

    The codes are rounded with the scale as it is stored.
    """
    count, columns = rows.shape
    x = rows.to(torch.float32).reshape(count, columns // group, group)
    largest = torch.maximum(x.amax(-1), -x.amin(-1))
    scale = (largest / 127).clamp_(min=_SMALLEST).to(torch.bfloat16)
    codes = (x / scale.float().unsqueeze(-1)).round_().clamp_(-127, 127)
    return Codes(codes.to(torch.int8).reshape(count, columns), scale)
