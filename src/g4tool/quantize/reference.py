"""4 bit by the hqq package itself, to compare with; wants the extra `hqq`."""

import torch
from torch import Tensor

from g4tool.errors import G4Error
from g4tool.quantize.pack import Codes


def solve(rows: Tensor, group: int) -> Codes:
    """Quantize a whole weight [N, K] in groups of `group` columns, with the package's defaults.

    Its early stop looks at the error of all it is given, so a part of a weight comes out
    differently. Scale and zero are stored as bf16; the codes are the package's own. Raises G4Error
    when the package is not installed.
    """
    if rows.shape[1] % group:
        # The package would let groups run on into the next row.
        raise ValueError(f"groups of {group} do not divide {rows.shape[1]} columns")
    try:
        from hqq.core.quantize import Quantizer
    except ImportError:
        raise G4Error(
            "The solver reference is the hqq package, which is not installed; "
            "pip install 'g4tool[hqq]'."
        ) from None
    codes, facts = Quantizer.quantize(
        rows.to(torch.float32),
        nbits=4,
        group_size=group,
        axis=1,
        bitpack=False,
        device=str(rows.device),
    )
    count = rows.shape[0]

    def by_column(values: Tensor) -> Tensor:
        return values.to(torch.bfloat16).reshape(count, -1).t().contiguous()

    return Codes(
        codes.to(torch.uint8).reshape(count, -1),
        by_column(facts["scale"]),
        by_column(facts["zero"]),
    )
