"""neuron_config.json's names and values, buckets and compiler flags, against NxD Inference's."""

from dataclasses import replace

import pytest

from g4tool.backends.neuron.setting_names import NAMES
from g4tool.backends.neuron.settings import (
    NeuronOptions,
    buckets,
    compiler_flags,
    config_content,
    neuron_settings,
)
from g4tool.backends.neuron.targets import GIB, chip, smallest_instance
from g4tool.errors import UsageError

_OPTIONS = NeuronOptions(4, 2, 2048, chip("trn2"), 2)


def test_golden_settings() -> None:
    assert neuron_settings(_OPTIONS) == {
        "tp_degree": 4,
        "world_size": 4,
        "start_rank_id": 0,
        "local_ranks_size": 4,
        "batch_size": 2,
        "ctx_batch_size": 2,
        "tkg_batch_size": 2,
        "max_batch_size": 2,
        "is_continuous_batching": False,
        "seq_len": 2048,
        "max_length": 2048,
        "max_context_length": 2048,
        "n_positions": 2048,
        "torch_dtype": "bfloat16",
        "padding_side": "right",
        "enable_bucketing": True,
        "context_encoding_buckets": [128, 256, 512, 1024, 2048],
        "token_generation_buckets": [128, 256, 512, 1024, 2048],
        "fused_qkv": False,
        "attn_kernel_enabled": False,
        "sequence_parallel_enabled": False,
        "on_device_sampling_config": None,
        "output_logits": False,
        "logical_nc_config": 2,
        "target": "trn2",
        "save_sharded_checkpoint": True,
        "skip_sharding": True,
        "async_mode": False,
        "quantized": False,
    }


def test_settings_for_serving() -> None:
    """What vLLM's plugin asks for by default; one row needs no batching."""
    plain = neuron_settings(_OPTIONS)
    served = neuron_settings(replace(_OPTIONS, serving=True))
    assert {name: value for name, value in served.items() if value != plain[name]} == {
        "ctx_batch_size": 1,
        "is_continuous_batching": True,
        "on_device_sampling_config": {"dynamic": True, "deterministic": False},
    }
    alone = neuron_settings(replace(_OPTIONS, batch=1, serving=True))
    assert alone["is_continuous_batching"] is False


def test_every_name_is_one_that_nxd_inference_has() -> None:
    assert set(neuron_settings(_OPTIONS)) <= NAMES
    assert list(config_content(_OPTIONS, {"model_type": "gemma4"})) == [
        "neuron_config",
        "hf_config",
    ]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(64, [64]), (128, [128]), (512, [128, 256, 512]), (513, [128, 256, 513]), (130, [130])],
)
def test_buckets(length: int, expected: list[int]) -> None:
    """As NxD Inference's generate_buckets(128, length), where length is longer than 128."""
    assert buckets(length) == expected


def test_flags() -> None:
    prompt = compiler_flags(_OPTIONS, "context_encoding_model")
    token = compiler_flags(_OPTIONS, "token_generation_model")
    assert " -O1 " in prompt
    assert " -O2 " in token
    assert "--cc-pipeline-tiling-factor=2 --vectorize-strided-dma '" in prompt
    assert "--cc-pipeline-tiling-factor=1" in token
    assert "--modular-flow-mac-threshold=10" in prompt
    assert "--modular-flow" not in token
    assert "--hbm-scratchpad-page-size" not in prompt
    for flags in (prompt, token):
        assert flags.startswith("--auto-cast=none --model-type=transformer ")
        assert "--lnc=2" in flags
        assert "--target trn2" in flags
    long = NeuronOptions(4, 1, 32768, chip("trn2"), 2)
    assert "--hbm-scratchpad-page-size=1024" in compiler_flags(long, "token_generation_model")


@pytest.mark.parametrize(
    ("name", "lnc", "gib", "ranks", "instance"),
    [
        ("inf2", 1, 16, 2, "inf2.xlarge"),
        ("inf2", 1, 16, 16, "inf2.48xlarge"),
        ("trn1", 1, 16, 4, "trn1.32xlarge"),
        ("trn2", 2, 24, 4, "trn2.3xlarge"),
        ("trn2", 1, 12, 16, "trn2.48xlarge"),
        ("trn3", 2, 36, 4, "one Trainium3 chip"),
        ("trn1", 1, 16, 64, None),
    ],
)
def test_targets(name: str, lnc: int, gib: int, ranks: int, instance: str | None) -> None:
    assert chip(name).core_memory(lnc) == gib * GIB
    assert smallest_instance(chip(name), ranks, lnc) == instance


def test_unknown_target() -> None:
    with pytest.raises(UsageError, match="the names are inf2, trn1, trn2, trn3"):
        chip("inf1")
