"""The next token chosen inside a program, so that logits need not leave the device."""

import torch
from torch import Tensor

SCALARS = (torch.tensor(1.0), torch.tensor(40), torch.tensor(0.9), torch.tensor(0.5))
"""Examples of temperature, top_k, top_p and uniform, in their dtypes."""


def next_id(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    """The next id, int64 [1, 1], from logits fp32 [1, V]; -1 where they are not finite.

    temperature fp32 [] (0 is greedy), top_k int64 [] (0 is all), top_p fp32 [] (1 is all), in the
    meaning and order of g4tool.generate.sampler. uniform fp32 [], from [0, 1), is the only random
    thing: it picks from the kept tokens, most likely first, by their cumulated probability.
    """
    vocab = logits.shape[-1]
    finite = logits.amax(-1, keepdim=True).isfinite()
    usable = torch.where(finite, logits, 0.0)
    scores, order = torch.sort(usable / temperature.clamp(min=1e-5), dim=-1, descending=True)
    last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab) - 1
    least = scores.index_select(-1, last.reshape(1))
    scores = torch.where(scores >= least, scores, -torch.inf)
    probabilities = scores.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ranks = torch.arange(vocab, device=logits.device)
    kept = torch.where((before < top_p) | (ranks == 0), probabilities, 0.0)
    reached = kept.cumsum(-1)
    # The count of those not reaching it is the rank of the first that does.
    rank = (reached <= uniform * reached[:, -1:]).sum(-1, keepdim=True).clamp(max=vocab - 1)
    # Rounding may lead past the last kept token, whose followers have no probability.
    rank = torch.minimum(rank, (kept > 0).sum(-1, keepdim=True) - 1)
    sampled = torch.gather(order, -1, rank)
    greedy = usable.argmax(-1, keepdim=True)
    chosen = torch.where(temperature > 0, sampled, greedy)
    return torch.where(finite, chosen, -1)
