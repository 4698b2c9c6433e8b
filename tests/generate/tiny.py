"""A small tokenizer folder in Gemma 4's form, and a small model beside transformers' twin."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|think|>", "<|channel>", "<channel|>"),
    *("<|turn>", "<turn|>", "<|tool_response>", "<|image|>"),
]
CORPUS = [
    "the user asks a question and the model thinks about a thought before it answers",
    "system model user thought turn channel, numbers 1 2 3 4 5 6 7 8 9 0",
    "A model's answer. What is the capital of France? Paris! <|>/\"{}()[]:;#*-_=+\n",
]

TEMPLATE = """{{ bos_token }}
{%- if enable_thinking is defined and enable_thinking or messages[0]['role'] == 'system' -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<|think|>' -}}{%- endif -%}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim -}}{%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages if message['role'] != 'system' -%}
    {%- if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('no role called ' ~ message['role']) }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' ~ role ~ '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'].split('<channel|>')[-1] | trim -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' %}{{ '<|image|>' }}{% continue %}{% endif -%}
            {{- part['text'] | trim -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """BPE with byte fallback, Gemma's normaliser, pre-tokenizer and decoder; no post-processor."""
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIALS + byte_tokens, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    raw = json.loads(trained.to_str())
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] in SPECIALS]
    return Tokenizer.from_str(json.dumps(raw))


def write_tokenizer(folder: Path) -> Path:
    """The folder with tokenizer, template and configs, as a published checkpoint has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in SPECIALS}
    tables: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": {
            "bos_token": "<bos>",
            "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True},
            "pad_token": "<pad>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "generation_config.json": {"eos_token_id": [ids["<eos>"], ids["<|tool_response>"]]},
        "config.json": {"text_config": {"eos_token_id": ids["<eos>"]}},
    }
    for name, table in tables.items():
        (folder / name).write_text(json.dumps(table))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
