"""The five published Gemma 4 text models, from Google's configuration tables."""

from g4tool.model.config import (
    AttentionKind,
    LayerConfig,
    MoeConfig,
    TextConfig,
    kv_sources,
)

SLIDING_HEAD_DIM = 256
FULL_HEAD_DIM = 512
VOCAB_SIZE = 262144


def _variant(
    *,
    hidden: int,
    layers: int,
    full_every: int,
    intermediate: int,
    heads: int,
    kv_heads: tuple[int, int],
    window: int = 1024,
    positions: int = 262144,
    value_from_key: bool = True,
    shared: int = 0,
    double_wide: bool = False,
    per_layer_dim: int = 0,
    moe: MoeConfig | None = None,
) -> TextConfig:
    """One row of the table; `kv_heads` of sliding and of full layers, the last `shared` share."""
    kinds: list[AttentionKind] = [
        "full" if number % full_every == 0 else "sliding" for number in range(1, layers + 1)
    ]
    rows = []
    for kind, source in zip(kinds, kv_sources(kinds, shared), strict=True):
        full = kind == "full"
        wide = double_wide and source is not None
        rows.append(
            LayerConfig(
                attention=kind,
                head_dim=FULL_HEAD_DIM if full else SLIDING_HEAD_DIM,
                num_kv_heads=kv_heads[1] if full else kv_heads[0],
                intermediate_size=2 * intermediate if wide else intermediate,
                value_from_key=full and value_from_key,
                kv_source=source,
            )
        )
    return TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_heads=heads,
        layers=tuple(rows),
        sliding_window=window,
        max_position_embeddings=positions,
        per_layer_dim=per_layer_dim,
        per_layer_vocab_size=VOCAB_SIZE if per_layer_dim else 0,
        moe=moe,
    )


VARIANTS: dict[str, TextConfig] = {
    "e2b": _variant(
        hidden=1536,
        layers=35,
        full_every=5,
        intermediate=6144,
        heads=8,
        kv_heads=(1, 1),
        window=512,
        positions=131072,
        value_from_key=False,
        shared=20,
        double_wide=True,
        per_layer_dim=256,
    ),
    "e4b": _variant(
        hidden=2560,
        layers=42,
        full_every=6,
        intermediate=10240,
        heads=8,
        kv_heads=(2, 2),
        window=512,
        positions=131072,
        value_from_key=False,
        shared=18,
        per_layer_dim=256,
    ),
    "12b": _variant(
        hidden=3840, layers=48, full_every=6, intermediate=15360, heads=16, kv_heads=(8, 1)
    ),
    "26b-a4b": _variant(
        hidden=2816,
        layers=30,
        full_every=6,
        intermediate=2112,
        heads=16,
        kv_heads=(8, 2),
        moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=704),
    ),
    "31b": _variant(
        hidden=5376, layers=60, full_every=6, intermediate=21504, heads=32, kv_heads=(16, 4)
    ),
}
