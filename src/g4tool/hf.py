"""Teaches transformers the int4 experts of our compressed-tensors bundles: `import g4tool.hf`.

vLLM reads experts one by one; transformers holds those of a layer in two tensors and has no rule
that leads from one to the other. Importing this module registers it, and takes from the bundle's
config the word that stops transformers without it (`formats.compressed_tensors.GUARD`). Experts
are unpacked into the model's dtype as they are read; the other layers stay packed.
"""

from typing import Any

import torch
from torch import Tensor

from g4tool.formats.compressed_tensors import GUARD, METHOD, dequantized

try:
    from transformers import conversion_mapping
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    from transformers.utils import quantization_config
except ImportError as error:
    raise ImportError(
        "g4tool.hf needs transformers 5.24 or newer: pip install 'transformers>=5.24'."
    ) from error

_PARTS = ("weight_packed", "weight_scale", "weight_shape")


class UnpackExperts(ConversionOps):  # type: ignore[misc]
    """Packed experts of a layer, one by one -> its fused weight [E, N, K], the projections stacked
    along N in the order of the sources."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, list[Tensor]], source_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The weight under its target's name; the scales' dtype, the model's by now, is its own."""
        stems = [p.removesuffix(_PARTS[0]) for p in source_patterns if p.endswith(_PARTS[0])]
        parts = [[input_dict[stem + part] for part in _PARTS] for stem in stems]
        (target,) = kwargs["target_patterns"]
        fused: Tensor | None = None
        for expert, triples in enumerate(zip(*(zip(*p, strict=True) for p in parts), strict=True)):
            rows = torch.cat([dequantized(*triple) for triple in triples])
            if fused is None:
                fused = rows.new_empty(len(parts[0][0]), *rows.shape)
            fused[expert] = rows
        assert fused is not None, "a layer of experts has experts"
        return {target: fused}

    @property
    def reverse_op(self) -> "KeepFused":
        """What saving does."""
        return KeepFused()


class KeepFused(ConversionOps):  # type: ignore[misc]
    """Saves fused experts as transformers does without this module."""

    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, list[Tensor]]:
        """The weight as it is, under the name it had before the patterns changed it."""
        ((source, weight),) = input_dict.items()
        return {full_layer_name.replace(kwargs["target_patterns"][0], source): weight}

    @property
    def reverse_op(self) -> UnpackExperts:
        """What loading does."""
        return UnpackExperts()


class CompressedTensorsConfig(quantization_config.CompressedTensorsConfig):  # type: ignore[misc]
    """transformers' own, which may read our experts now. Named alike, since it compares names."""

    def __init__(self, *args: Any, quantization_status: Any = "initialized", **kwargs: Any) -> None:
        status = "compressed" if quantization_status == GUARD else quantization_status
        super().__init__(*args, quantization_status=status, **kwargs)


def _converter(target: str, projections: tuple[str, ...]) -> WeightConverter:
    sources = [f"experts.*.{each}.{part}" for each in projections for part in _PARTS]
    return WeightConverter(sources, [f"experts.{target}"], [UnpackExperts()])


def _register() -> None:
    model = "gemma4_text"
    known = conversion_mapping.get_checkpoint_conversion_mapping(model) or []
    ours = [
        _converter("gate_up_proj", ("gate_proj", "up_proj")),
        _converter("down_proj", ("down_proj",)),
    ]
    conversion_mapping.register_checkpoint_conversion_mapping(model, known + ours, overwrite=True)
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = CompressedTensorsConfig


_register()
