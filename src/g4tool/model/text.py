"""The Gemma 4 text model: token ids in, logits out, with or without a cache.

Runs as it stands, under torch.compile, and through strict torch.export: no Python in `forward`
depends on data, and caches are buffers that it mutates. Generation belongs under
`torch.inference_mode()` or `torch.no_grad()`: an autograd graph would grow with every cached chunk.
"""

from typing import cast

import torch
from torch import Tensor, nn

from g4tool.errors import G4Error
from g4tool.model.arithmetic import PLAIN, Arithmetic
from g4tool.model.attention import Attention
from g4tool.model.cache import KeyValueCache, Span, attention_mask, ring_after, ring_before
from g4tool.model.config import AttentionKind, LayerConfig, TextConfig
from g4tool.model.decoder import DecoderLayer
from g4tool.model.embedding import Embedding, root_scales
from g4tool.model.norm import RMSNorm
from g4tool.model.per_layer import per_layer_rows
from g4tool.model.rope import rope_tables


class TextModel(nn.Module):
    """The text part of every Gemma 4 variant; parameters carry the canonical names.

    Works under `torch.device("meta")`. `state_dict()` is the weights and layer scalars only.
    """

    arithmetic: Arithmetic = PLAIN

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size
        self.cache_size: tuple[int, int] | None = None  # batch, length
        self.embed_scales = root_scales(dim)
        self.embed_tokens = Embedding(config.vocab_size, dim)
        if config.per_layer_dim:
            width = config.num_layers * config.per_layer_dim
            self.per_layer_scales = root_scales(config.per_layer_dim)
            self.embed_tokens_per_layer = Embedding(config.per_layer_vocab_size, width)
            self.per_layer_model_projection = nn.Linear(dim, width, bias=False)
            self.per_layer_projection_norm = RMSNorm(config.per_layer_dim, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in config.layers)
        self.norm = RMSNorm(dim, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(dim, config.vocab_size, bias=False)
        self.kinds: dict[AttentionKind, LayerConfig] = {x.attention: x for x in config.layers}
        self.sources = {x.kv_source for x in config.layers}

    def forward(
        self, input_ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor:
        """Logits [B, S, vocab] of input_ids int64 [B, S]: `logits(hidden(...))`."""
        return self.logits(self.hidden(input_ids, start, pad))

    def hidden(
        self, input_ids: Tensor, start: Tensor | None = None, pad: Tensor | None = None
    ) -> Tensor:
        """Final normalised states [B, S, d] of input_ids int64 [B, S].

        Without `start` the ids are whole sequences and any cache is left alone. With `start`, a
        0-dim int64 tensor, they are the chunk that begins at that (padded) position, after
        everything the cache already holds; start + S must not exceed the cache's length, which
        the caller checks, since only it knows the value without waiting for the device.
        `pad` int64 [B] is the number of left-padding tokens of each row, the same in every call.
        Raises G4Error for a cache that is missing, too short for S, or of another batch size.
        """
        if start is not None:
            self._check_cache(input_ids)
        x = self.embed_tokens(input_ids)
        x = x * self.embed_scales[x.dtype]
        per_layer = self._per_layer(input_ids, x) if self.config.per_layer_dim else None
        spans = {kind: self._span(kind, x, start, pad) for kind in self.kinds}
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for number, (layer, block) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            source = None if layer.kv_source is None else shared[layer.kv_source]
            own = None if per_layer is None else per_layer[:, :, number]
            x, keys_values = block(x, spans[layer.attention], source, own)
            if number in self.sources:
                shared[number] = keys_values
        out: Tensor = self.norm(x)
        return out

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of final states [..., d], soft-capped to c * tanh(z / c)."""
        tied = self.config.tie_word_embeddings
        scores: Tensor = self.embed_tokens.project(hidden) if tied else self.lm_head(hidden)
        return softcapped(scores, self.config.softcap)

    def allocate_cache(
        self,
        batch: int,
        length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Gives every layer that makes keys and values an empty cache for `length` tokens a row.

        Full layers hold `length` slots, sliding layers at most their window. `dtype` and `device`
        default to the model's own. Raises G4Error for sizes below 1 or an integer dtype.
        """
        dtype = dtype or self.norm.weight.dtype
        if batch < 1 or length < 1:
            raise G4Error(
                f"cannot make a cache for batch {batch} and length {length}: "
                "both must be at least 1"
            )
        if not dtype.is_floating_point:
            raise G4Error(f"cannot make a cache of {dtype}: give a floating-point dtype")
        place = torch.device(device) if device is not None else self.device
        for layer, attention in zip(self.config.layers, self._attentions(), strict=True):
            if layer.kv_source is None:
                slots = self._slots(layer.attention, length)
                attention.cache = KeyValueCache(
                    batch, layer.num_kv_heads, slots, layer.head_dim, dtype, place
                )
        self.cache_size = (batch, length)

    def reset_cache(self) -> None:
        """Zeroes the caches. Starting again at position 0 does not need it."""
        for attention in self._attentions():
            if attention.cache is not None:
                attention.cache.keys.zero_()
                attention.cache.values.zero_()

    def drop_cache(self) -> None:
        """Frees the caches; `start` can then not be given until `allocate_cache`."""
        for attention in self._attentions():
            attention.cache = None
        self.cache_size = None

    def _attentions(self) -> list[Attention]:
        return [cast(DecoderLayer, block).self_attn for block in self.layers]

    def _per_layer(self, input_ids: Tensor, x: Tensor) -> Tensor:
        return per_layer_rows(
            input_ids,
            x,
            self.embed_tokens_per_layer,
            self.per_layer_scales,
            self.per_layer_model_projection,
            self.per_layer_projection_norm,
            self.config,
        )

    def _slots(self, kind: AttentionKind, length: int) -> int:
        return min(length, self.config.sliding_window) if kind == "sliding" else length

    def _span(
        self, kind: AttentionKind, x: Tensor, start: Tensor | None, pad: Tensor | None
    ) -> Span:
        """Positions, mask and cache slots of a chunk x [B, S, d] for the layers of one kind."""
        count = x.shape[1]
        positions = torch.arange(count, device=x.device)
        if start is not None:
            positions = positions + start
        own = positions[None] if pad is None else (positions[None] - pad[:, None]).clamp(min=0)
        rope = self.config.rope[kind]
        cos, sin = rope_tables(own, rope, self.kinds[kind].head_dim, x.dtype)
        if self.arithmetic.one_token:
            return Span(cos, sin, None, positions=positions)
        window = self.config.sliding_window if kind == "sliding" else None

        def mask(keys: Tensor) -> Tensor:
            return attention_mask(positions, keys, window, pad, x.dtype)

        if start is None:
            return Span(cos, sin, mask(positions))
        assert self.cache_size is not None
        size = self._slots(kind, self.cache_size[1])
        if kind == "full":
            return Span(cos, sin, mask(torch.arange(size, device=x.device)), slots=positions)
        held = ring_after(start + count - 1, size)
        if count == 1:
            return Span(cos, sin, mask(held), slots=torch.remainder(positions, size))
        seen = torch.cat((ring_before(start, size), positions))
        newest = (held - start).clamp(min=0)
        return Span(cos, sin, mask(seen), newest=newest, fresh=held >= start)

    def _check_cache(self, input_ids: Tensor) -> None:
        if self.cache_size is None:
            raise G4Error("a start position needs a cache: call allocate_cache first")
        batch, length = self.cache_size
        if input_ids.shape[0] != batch:
            raise G4Error(
                f"the cache was made for a batch of {batch}, but {input_ids.shape[0]} rows were "
                "given: call allocate_cache with this batch size"
            )
        # A traced length is symbolic: comparing it here would bake a limit into the program.
        if not torch.compiler.is_compiling() and input_ids.shape[1] > length:
            raise G4Error(
                f"a chunk of {input_ids.shape[1]} tokens does not fit a cache of {length}: "
                "allocate a longer cache or give a shorter chunk"
            )


def softcapped(scores: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(scores / cap), or the scores where there is no cap."""
    return scores if cap is None else torch.tanh(scores / cap) * cap
