"""What one Gemma 4 text model is: sizes, and one entry a layer.

Everything that differs between layers (window, head size, shared keys and values, width) is written
out per layer, so that no module has to know a rule such as "every sixth layer is full".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from g4tool.errors import G4Error

AttentionKind = Literal["sliding", "full"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one attention kind: base `theta`, `rotated` the rotated share (0, 1]."""

    theta: float
    rotated: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """One decoder layer.

    `kv_source` is the index of the earlier layer whose keys and values this layer attends to, or
    None when it makes its own. `value_from_key`: values are the raw key projection (no v_proj).
    """

    attention: AttentionKind
    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    value_from_key: bool = False
    kv_source: int | None = None


@dataclass(frozen=True)
class MoeConfig:
    """The experts beside the dense feed-forward of every layer."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True)
class TextConfig:
    """The text part of a Gemma 4 model. Sizes in elements.

    `sliding_window` counts tokens, the current one included. Layers of one attention kind have one
    head size. Raises G4Error for sizes that no model can have.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
    sliding_window: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    softcap: float | None = 30.0
    tie_word_embeddings: bool = True
    per_layer_dim: int = 0
    per_layer_vocab_size: int = 0
    moe: MoeConfig | None = None
    rope: dict[AttentionKind, RopeConfig] = field(
        default_factory=lambda: {
            "sliding": RopeConfig(theta=1e4),
            "full": RopeConfig(theta=1e6, rotated=0.25),
        }
    )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "sliding_window"):
            if getattr(self, name) < 1:
                raise G4Error(f"text config: {name} is {getattr(self, name)}, but must be positive")
        if not self.layers:
            raise G4Error("text config: there are no layers")
        if self.per_layer_dim and self.per_layer_vocab_size < self.vocab_size:
            raise G4Error(
                f"text config: per_layer_vocab_size is {self.per_layer_vocab_size}, but every one "
                f"of the {self.vocab_size} tokens needs a row of the per-layer table"
            )
        if self.moe and not 1 <= self.moe.top_k <= self.moe.num_experts:
            raise G4Error(
                f"text config: top_k is {self.moe.top_k}, but must lie between 1 and the "
                f"{self.moe.num_experts} experts"
            )
        for number in range(len(self.layers)):
            self._check_layer(number)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def _check_layer(self, number: int) -> None:
        layer = self.layers[number]
        where = f"text config: layer {number}"
        if layer.num_kv_heads < 1 or self.num_heads % layer.num_kv_heads:
            raise G4Error(
                f"{where} has {layer.num_kv_heads} key-value heads, which do not divide "
                f"the {self.num_heads} query heads"
            )
        if layer.head_dim < 2 or layer.head_dim % 2:
            raise G4Error(f"{where} has head_dim {layer.head_dim}, but must have an even one")
        if layer.attention not in self.rope:
            raise G4Error(f"{where} is {layer.attention}, which has no rope entry")
        first = next(x for x in self.layers if x.attention == layer.attention)
        if layer.head_dim != first.head_dim:
            raise G4Error(
                f"{where} has head_dim {layer.head_dim}, but another {layer.attention} layer has "
                f"{first.head_dim}"
            )
        if layer.kv_source is None:
            return
        source = self.layers[layer.kv_source] if 0 <= layer.kv_source < number else None
        if (
            source is None
            or source.kv_source is not None
            or source.attention != layer.attention
            or source.num_kv_heads != layer.num_kv_heads
        ):
            raise G4Error(
                f"{where} takes its keys and values from layer {layer.kv_source}, which is not an "
                "earlier layer of the same kind and shape that makes its own"
            )


def kv_sources(kinds: Sequence[AttentionKind], shared: int) -> tuple[int | None, ...]:
    """The kv_source of each layer when the last `shared` ones share keys and values.

    Each takes those of the last layer of its own kind that makes its own. Raises G4Error where
    there is none.
    """
    makers = len(kinds) - shared
    if shared < 0 or makers < 0:
        raise G4Error(f"text config: {shared} of {len(kinds)} layers cannot share keys and values")
    last = {kind: number for number, kind in enumerate(kinds[:makers])}
    missing = [kind for kind in kinds[makers:] if kind not in last]
    if missing:
        raise G4Error(
            f"text config: the last {shared} layers share keys and values, but no earlier "
            f"{missing[0]} layer makes them"
        )
    return tuple(None if n < makers else last[kind] for n, kind in enumerate(kinds))
