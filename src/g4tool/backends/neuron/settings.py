"""What is asked of NxD Inference, under its own field names.

`neuron_config.json` has two tables: `neuron_config`, NxD Inference's settings, and what the port's
config needs beside them. Names: neuronx_distributed_inference/models/config.py. NxD Inference
only logs a warning for a name it does not know, so the names are kept to those it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import Any

from g4tool.backends.neuron.targets import Chip

SMALLEST_BUCKET = 128
_LONG_CONTEXT = 32 * 1024
# As the plugin's own default: each request brings its top-k, top-p and temperature.
_SAMPLING = {"dynamic": True, "deterministic": False}
_LONG_FLAGS = ("--internal-disable-fma-on-ios", "--disable-mixed-precision-accumulation")


@dataclass(frozen=True)
class NeuronOptions:
    """What to compile: `tp` ranks, `batch` rows of `seq_len` tokens in all, `lnc` cores a rank.

    `serving`: as vLLM's plugin runs it: prompts join one at a time, and tokens are chosen on the
    device.
    """

    tp: int
    batch: int
    seq_len: int
    chip: Chip
    lnc: int
    dtype: str = "bfloat16"
    serving: bool = False


def buckets(longest: int) -> list[int]:
    """Lengths in tokens that are compiled: powers of two from 128 on, and the longest itself.

    The same as NxD Inference's own, which rounds where `longest` is no power of two.
    """
    if longest <= SMALLEST_BUCKET:
        return [longest]
    return [2**n for n in range(int(log2(SMALLEST_BUCKET)), round(log2(longest)))] + [longest]


def neuron_settings(options: NeuronOptions) -> dict[str, Any]:
    """NxD Inference's settings, JSON values by its field names."""
    return {
        "tp_degree": options.tp,
        "world_size": options.tp,
        "start_rank_id": 0,
        "local_ranks_size": options.tp,
        "batch_size": options.batch,
        "ctx_batch_size": 1 if options.serving else options.batch,
        "tkg_batch_size": options.batch,
        "max_batch_size": options.batch,
        "is_continuous_batching": options.serving and options.batch > 1,
        "seq_len": options.seq_len,
        "max_length": options.seq_len,
        "max_context_length": options.seq_len,
        "n_positions": options.seq_len,
        "torch_dtype": options.dtype,
        "padding_side": "right",
        "enable_bucketing": True,
        "context_encoding_buckets": buckets(options.seq_len),
        "token_generation_buckets": buckets(options.seq_len),
        "fused_qkv": False,
        # NxD's attention kernels take head sizes up to 128; Gemma 4 has 256 and 512.
        "attn_kernel_enabled": False,
        "sequence_parallel_enabled": False,
        "on_device_sampling_config": _SAMPLING if options.serving else None,
        # Without sampling logits are the result; this would add another copy of all ranks' logits.
        "output_logits": False,
        "logical_nc_config": options.lnc,
        "target": options.chip.name,
        "save_sharded_checkpoint": True,
        "skip_sharding": True,
        "async_mode": False,
        "quantized": False,
    }


def config_content(options: NeuronOptions, raw_config: Mapping[str, Any]) -> dict[str, Any]:
    """neuron_config.json: the settings, and the model's own config.json as it was published."""
    return {"neuron_config": neuron_settings(options), "hf_config": dict(raw_config)}


def compiler_flags(options: NeuronOptions, part: str) -> str:
    """What NxD Inference gives neuronx-cc for `part`, context_encoding_model or another.

    Source: neuronx_distributed_inference/models/model_wrapper.py.
    """
    long = options.seq_len >= _LONG_CONTEXT
    prompt = part == "context_encoding_model"
    # It pipelines collectives in prompts only.
    tiling = f"--cc-pipeline-tiling-factor={2 if prompt else 1}"
    flags = [
        "--auto-cast=none",
        "--model-type=transformer",
        *(_LONG_FLAGS if long else ()),
        f"--tensorizer-options='--enable-ccop-compute-overlap {tiling} --vectorize-strided-dma '",
        f"--lnc={options.lnc}",
        *(("--hbm-scratchpad-page-size=1024",) if long else ()),
        "-O1" if prompt else "-O2",
        f"--target {options.chip.name}",
        "--internal-hlo2tensorizer-options='"
        + ("--modular-flow-mac-threshold=10 " if prompt else "")
        + "--verify-hlo=true'",
    ]
    return " ".join(flags)
