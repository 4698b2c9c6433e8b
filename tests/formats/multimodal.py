"""A checkpoint with all that gets lost: towers, tied head, fused experts, dead keys, side files."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from g4tool.checkpoint.tiny import tiny_folder

TEXT = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 4096,
    "num_kv_shared_layers": 2,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 1024,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
    "use_clipped_linears": True,
    "standardize": True,
}
DEAD = [
    f"model.language_model.layers.{layer}.self_attn.{part}.weight"
    for layer in (2, 3)
    for part in ("k_proj", "v_proj", "k_norm")
]


def write_multimodal(folder: Path) -> Path:
    """Write it; returns `folder`."""
    torch.manual_seed(0)
    model = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=TEXT, vision_config=VISION, audio_config=None)
    )
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.normal_(1.0 if value.dim() < 2 else 0.0, 0.1)
    model.bfloat16().save_pretrained(folder)
    values = load_file(folder / "model.safetensors")
    for name in DEAD:
        alive = name.replace("layers.2", "layers.0").replace("layers.3", "layers.1")
        values[name] = torch.zeros_like(values[alive])
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in tokenizer:
        shutil.copy(tiny_folder("tiny-26b-a4b") / name, folder)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"image_seq_length": 280}))
    return folder
