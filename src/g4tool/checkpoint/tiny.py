"""The tiny models that ship with g4: trained checkpoints in exactly the published layout.

Their sizes are such that foreign runtimes load them: head size 32, every width a multiple of 32.
`tools/train_tiny.py` trains them.
"""

import shutil
from importlib import resources
from pathlib import Path

from g4tool.errors import UsageError
from g4tool.model.config import (
    AttentionKind,
    LayerConfig,
    MoeConfig,
    TextConfig,
    kv_sources,
)


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


def tiny_folder(name: str) -> Path:
    """Where the checkpoint of the tiny model `name` lies.

    Raises UsageError for a name that is not in TINY.
    """
    if name not in TINY:
        raise UsageError(f"there is no tiny model {name!r}; the names are {', '.join(TINY)}.")
    return Path(str(resources.files("g4tool.checkpoint"))) / "data" / name


def write_tiny(name: str, folder: Path) -> list[Path]:
    """Copy the tiny model `name` into `folder` and return its files."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        Path(shutil.copyfile(path, folder / path.name))
        for path in sorted(tiny_folder(name).iterdir())
    ]
