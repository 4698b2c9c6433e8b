"""The port's two configs: what NxD Inference is asked to do, and the model it does it to."""

# mypy: disable-error-code="import-not-found, import-untyped, misc"

from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig

from g4tool.backends.neuron.nxdi_layout import even_plan
from g4tool.checkpoint.config import parse_text_config
from g4tool.checkpoint.folder import read_config
from g4tool.errors import G4Error
from g4tool.model.config import TextConfig

# What the port does not do, and the only value each setting may have. The attention kernels take
# head sizes up to 128, and Gemma 4 has 256 and 512.
_FIXED: dict[str, Any] = {
    "attn_kernel_enabled": False,
    "attn_tkg_nki_kernel_enabled": False,
    "attn_block_tkg_nki_kernel_enabled": False,
    "padding_side": "right",
    "fused_qkv": False,
    "cp_degree": 1,
    "attention_dp_degree": 1,
    "pp_degree": 1,
    "ep_degree": 1,
    "sequence_parallel_enabled": False,
    "flash_decoding_enabled": False,
    "is_block_kv_layout": False,
    "is_prefix_caching": False,
    "windowed_context_encoding_size": None,
    "layer_boundary_markers": False,
    "k_cache_transposed": False,
    "kv_quant_config": None,
    "kv_cache_padding_size": 0,
    "apply_seq_ids_mask": False,
    "speculation_length": 0,
    "enable_fused_speculation": False,
    "is_medusa": False,
    "lora_config": None,
    "quantized": False,
}


class Gemma4NeuronConfig(NeuronConfig):
    """NxD Inference's settings, less those that the port does not support.

    Raises G4Error for a setting of `_FIXED` that is given another value.
    """

    def __init__(self, **kwargs: Any) -> None:
        # None leaves it to NxD Inference, which looks at lengths and not at head sizes.
        kwargs["attn_kernel_enabled"] = bool(kwargs.get("attn_kernel_enabled"))
        super().__init__(**kwargs)
        for name, value in _FIXED.items():
            given = getattr(self, name, value)
            if given != value:
                raise G4Error(
                    f"neuron_config: {name} is {given!r}, but the Gemma 4 port needs {value!r}."
                )


class Gemma4InferenceConfig(InferenceConfig):
    """A Gemma 4 text model for NxD Inference; `hf_config` is config.json's content, any spelling.

    Everything else follows from it. Raises G4Error for a model that cannot be split as asked.
    """

    def __init__(
        self,
        neuron_config: NeuronConfig,
        fused_spec_config: None = None,
        load_config: Callable[[Any], None] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(neuron_config, fused_spec_config, load_config, metadata, **kwargs)

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str, neuron_config: NeuronConfig
    ) -> "Gemma4InferenceConfig":
        """The config of the checkpoint in `folder`, read without transformers."""
        return cls(neuron_config, load_config=from_folder(folder))

    @classmethod
    def get_neuron_config_cls(cls) -> type[Gemma4NeuronConfig]:
        """The class of `neuron_config`."""
        return Gemma4NeuronConfig

    @property
    def text(self) -> TextConfig:
        """The text model, one entry a layer."""
        return parse_text_config(self.hf_config)

    def get_required_attributes(self) -> list[str]:
        """What a config must have been given."""
        return ["hf_config"]

    def get_text_config(self) -> "Gemma4InferenceConfig":
        """This config: NxD Inference reads sizes from it."""
        return self

    def add_derived_config(self) -> None:
        """The attributes that NxD Inference itself reads."""
        text = self.text
        first = text.layers[0]
        self.num_cores_per_group = 1
        self.model_type = "gemma4_text"
        self.vocab_size = text.vocab_size
        self.hidden_size = text.hidden_size
        self.intermediate_size = first.intermediate_size
        self.num_hidden_layers = text.num_layers
        self.num_attention_heads = text.num_heads
        self.num_key_value_heads = first.num_kv_heads
        self.head_dim = first.head_dim
        self.max_position_embeddings = text.max_position_embeddings
        self.rms_norm_eps = text.rms_norm_eps
        self.pad_token_id = 0
        self.output_attentions = self.output_hidden_states = False
        self.use_return_dict = True
        # The port's head reads the embedding itself, so NxD has no second copy to make.
        self.tie_word_embeddings = False
        even_plan(text, self.neuron_config.tp_degree)


def from_folder(folder: Path | str) -> Callable[[Any], None]:
    """NxD Inference's `load_config` for a checkpoint's folder."""

    def load(config: Any) -> None:
        config.hf_config = read_config(Path(folder))
        # Where NxD Inference looks for weights when a compiled model has no shards beside it.
        config._name_or_path = str(Path(folder).absolute())

    return load
