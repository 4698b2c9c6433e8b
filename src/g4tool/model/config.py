"""What one Gemma 4 text model is: sizes, and one entry a layer.

Everything that differs between layers (window, head size, shared keys and values, width) is written
out per layer, so that no module has to know a rule such as "every sixth layer is full".
"""

from dataclasses import dataclass, field
from typing import Literal

AttentionKind = Literal["sliding", "full"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one attention kind: base `theta`; `rotated` is the rotated share (0, 1]."""

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
    """The text part of a Gemma 4 model. Sizes in elements; `sliding_window` in tokens, self included."""

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

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)
