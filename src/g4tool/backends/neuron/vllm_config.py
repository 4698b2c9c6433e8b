"""Gemma 4's config.json for transformers' releases before 5.5, one class a model type.

Classes of a module, because vLLM hands them from process to process.
"""

# mypy: disable-error-code="misc"

from typing import Any

from transformers import PretrainedConfig


class _Gemma4(PretrainedConfig):
    def __init__(self, hf_config: dict[str, Any] | None = None, **settings: Any) -> None:
        raw = hf_config or {"model_type": self.model_type, **settings}
        super().__init__(**text_settings(raw))


class Gemma4(_Gemma4):
    """A multimodal model; what is served is its text."""

    model_type = "gemma4"


class Gemma4Text(_Gemma4):
    """A text model."""

    model_type = "gemma4_text"


class Gemma4Unified(_Gemma4):
    """The multimodal model without encoders."""

    model_type = "gemma4_unified"


class Gemma4UnifiedText(_Gemma4):
    """Its text model."""

    model_type = "gemma4_unified_text"


CONFIGS: tuple[type[_Gemma4], ...] = (Gemma4, Gemma4Text, Gemma4Unified, Gemma4UnifiedText)


def text_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """A config.json's content with the text model's settings at the top, and itself beside them.

    The plugin looks for head counts at the top, and the port for the whole under `hf_config`.
    """
    inner = raw.get("text_config") or {}
    outer = {key: value for key, value in raw.items() if not key.endswith("_config")}
    return {**inner, **outer, "hf_config": raw}
