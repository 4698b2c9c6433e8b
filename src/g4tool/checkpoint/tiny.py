"""The tiny models: checkpoints in exactly the published layout, made from a seed.

Their sizes are such that foreign runtimes load them: head size 32, every width a multiple of 32.
The weights are random, spread so that layers, experts and scalars all matter to the output.
"""

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from g4tool.checkpoint.config import to_hf_config
from g4tool.checkpoint.folder import CONFIG
from g4tool.checkpoint.inventory import Shape, text_tensors
from g4tool.checkpoint.names import TEXT_PREFIX, hf_name
from g4tool.checkpoint.writer import Spec, write_checkpoint
from g4tool.errors import UsageError
from g4tool.files import write_bytes, write_json, write_text
from g4tool.model.config import (
    AttentionKind,
    LayerConfig,
    MoeConfig,
    TextConfig,
    kv_sources,
)

_SEED = 0
# Small enough that every tiny model has several shards and an index.
_SHARD_BYTES = 2_000_000
_CONTROL_TOKENS = [
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"),
    *("<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>"),
]


def _tiny(
    pattern: str,
    *,
    heads: int,
    kv_heads: tuple[int, int],
    width: int,
    value_from_key: bool,
    shared: int = 0,
    per_layer_dim: int = 0,
    moe: MoeConfig | None = None,
) -> TextConfig:
    """A config whose layers are `pattern`, one letter each; `kv_heads` are sliding, full."""
    kinds: list[AttentionKind] = ["full" if letter == "f" else "sliding" for letter in pattern]
    layers = tuple(
        LayerConfig(
            attention=kind,
            head_dim=64 if kind == "full" else 32,
            num_kv_heads=kv_heads[kind == "full"],
            intermediate_size=width if source is None else 2 * width,
            value_from_key=value_from_key and kind == "full",
            kv_source=source,
        )
        for kind, source in zip(kinds, kv_sources(kinds, shared), strict=True)
    )
    return TextConfig(
        vocab_size=4096,
        hidden_size=128,
        num_heads=heads,
        layers=layers,
        sliding_window=32,
        max_position_embeddings=1024,
        per_layer_dim=per_layer_dim,
        per_layer_vocab_size=4096 if per_layer_dim else 0,
        moe=moe,
    )


TINY: dict[str, TextConfig] = {
    "tiny-31b": _tiny("sssssf", heads=16, kv_heads=(4, 2), width=512, value_from_key=True),
    "tiny-e2b": _tiny(
        "ssfsf",
        heads=8,
        kv_heads=(1, 1),
        width=256,
        value_from_key=False,
        shared=2,
        per_layer_dim=64,
    ),
    "tiny-26b-a4b": _tiny(
        "ssf",
        heads=8,
        kv_heads=(4, 2),
        width=256,
        value_from_key=True,
        moe=MoeConfig(num_experts=8, top_k=2, intermediate_size=256),
    ),
}


def write_tiny(name: str, folder: Path) -> list[Path]:
    """Write the tiny model `name` into `folder` and return its files; the bytes never vary.

    Raises UsageError for a name that is not in TINY.
    """
    if name not in TINY:
        raise UsageError(f"there is no tiny model {name!r}; the names are {', '.join(TINY)}.")
    config = TINY[name]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, to_hf_config(config))
    write_json(folder / "generation_config.json", _generation_config())
    write_json(folder / "tokenizer_config.json", _tokenizer_config(config))
    data = resources.files("g4tool.checkpoint") / "data"
    write_bytes(folder / "tokenizer.json", (data / "tokenizer.json").read_bytes())
    # As published: the large models' template closes an empty thought, the small ones' does not.
    large = "false" if config.per_layer_dim else "true"
    template = (data / "chat_template.jinja").read_text(encoding="utf-8")
    write_text(
        folder / "chat_template.jinja",
        f"{{%- set append_empty_thought = {large} -%}}\n{template}",
    )
    small = [
        folder / file
        for file in (
            CONFIG,
            "generation_config.json",
            "tokenizer_config.json",
            "tokenizer.json",
            "chat_template.jinja",
        )
    ]
    values = {
        hf_name(tensor, TEXT_PREFIX): _values(name, tensor, shape)
        for tensor, shape in text_tensors(config).items()
    }
    specs: dict[str, Spec] = {
        key: (value.dtype, tuple(value.shape)) for key, value in values.items()
    }
    return small + write_checkpoint(
        folder, specs, lambda key, start, stop: values[key][start:stop], shard_bytes=_SHARD_BYTES
    )


def _values(model: str, name: str, shape: Shape) -> torch.Tensor:
    """The bfloat16 values of one tensor, seeded by its name."""
    digest = hashlib.sha256(f"{_SEED} {model} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if name.endswith("layer_scalar"):
        values = 0.5 + _uniform(shape, generator)
    elif len(shape) == 1:
        values = 1 + 0.3 * _normal(shape, generator)
        # The last norm sets the spread of the logits, the ones after a branch its share.
        if name == "norm.weight":
            values *= 3
        elif ".post_" in name:
            values *= 2
    else:
        values = (1.0 if ".router." in name else 0.08) * _normal(shape, generator)
    return values.to(torch.bfloat16)


def _uniform(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """float64 values in [0, 1), multiples of 2^-16."""
    integers = torch.randint(0, 1 << 16, shape, generator=generator)
    return integers.double() / (1 << 16)


def _normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """float64 values of mean 0 and variance 1, close to normal: a sum of twelve uniforms.

    torch.randn's last bits depend on the processor's vector unit; sums of integers do not.
    """
    total = torch.zeros(shape, dtype=torch.float64)
    for _ in range(12):
        total += _uniform(shape, generator)
    return total - (6 - 6 / (1 << 16))


def _generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": 2,
        "do_sample": True,
        "eos_token_id": [1, 106, 50],
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }


def _tokenizer_config(config: TextConfig) -> dict[str, Any]:
    return {
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        # Converters split a control token in two that is not listed here.
        "extra_special_tokens": _CONTROL_TOKENS,
        "mask_token": "<mask>",
        "model_max_length": config.max_position_embeddings,
        "pad_token": "<pad>",
        "padding_side": "left",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    }
