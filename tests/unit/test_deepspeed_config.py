"""DeepSpeed's configuration has one source for each value."""

import json

import pytest

from phalanx.config import load_config
from phalanx.config.deepspeed import engine_config
from phalanx.errors import ConfigError


def made(tmp_path, said=None, *overrides, batch_size=None, world_size=None):
    if said is not None:
        (tmp_path / "ds.json").write_text(said if isinstance(said, str) else json.dumps(said))
        overrides = (*overrides, f"deepspeed.config={tmp_path / 'ds.json'}")
    return engine_config(load_config((), overrides, {}).config, batch_size, world_size)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_the_run_decides(tmp_path, stage):
    config = made(tmp_path, None, f"deepspeed.zero_stage={stage}", "accumulate=4", batch_size=16)
    assert config["zero_optimization"] == {"stage": stage}
    # Steps are the run's: DeepSpeed neither divides losses by an accumulation of its own, nor clips (its default is 1).
    assert config["gradient_accumulation_steps"] == 1
    assert config["managed_gradient_accumulation"] is False
    assert config["gradient_clipping"] == 0.0
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert "fp16" not in config
    assert "bf16" not in config


def test_offload_to_the_cpu(tmp_path):
    two = made(tmp_path, None, "deepspeed.offload=cpu", "deepspeed.zero_stage=2")["zero_optimization"]
    assert two == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    three = made(tmp_path, None, "deepspeed.offload=cpu", "deepspeed.zero_stage=3")["zero_optimization"]
    assert three["offload_param"] == {"device": "cpu"}


def test_the_users_file_is_merged_and_auto_gives_way(tmp_path):
    said = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": 3, "overlap_comm": False, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    overrides = ("deepspeed.zero_stage=3", "deepspeed.offload=cpu", "accumulate=2", "precision=bf16")
    config = made(tmp_path, said, *overrides, batch_size=8, world_size=2)
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"]) == (3, False)
    assert zero["offload_optimizer"] == {"device": "cpu", "ratio": 0.5}
    assert config["bf16"] == {"enabled": True}
    assert config["activation_checkpointing"] == {"cpu_checkpointing": True}
    assert config["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in config


def test_fp16_is_the_engines_own(tmp_path):
    assert made(tmp_path, None, "precision=fp16")["fp16"] == {"enabled": True}
    scaled = made(tmp_path, {"fp16": {"enabled": True, "initial_scale_power": 12}}, "precision=fp16")
    assert scaled["fp16"] == {"enabled": True, "initial_scale_power": 12}


@pytest.mark.parametrize(
    ("said", "overrides", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 32}, (), ["train_micro_batch_size_per_gpu", "32", "16"]),
        ({"train_batch_size": 16}, (), ["train_batch_size", "16", "64"]),
        ({"gradient_accumulation_steps": 4}, ("accumulate=2",), ["gradient_accumulation_steps", "4", "accumulate=2"]),
        ({"gradient_clipping": 1.0}, (), ["gradient_clipping", "run.clip_grad_norm"]),
        ({"bf16": {"enabled": True}}, (), ["bf16", "precision=fp32"]),
        ({"fp16": {"enabled": True}}, ("precision=bf16",), ["fp16", "precision=bf16"]),
        ({"fp16": {"enabled": False}}, ("precision=fp16",), ["fp16", "precision=fp16"]),
        ({"optimizer": {"type": "AdamW"}}, (), ["optimizer", "training script"]),
        ({"scheduler": {"type": "WarmupLR"}}, (), ["scheduler", "training script"]),
        ({"zero_optimization": {"stage": 1}}, ("deepspeed.zero_stage=3",), ["zero_optimization.stage", "1", "3"]),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}},
            ("deepspeed.zero_stage=3", "deepspeed.offload=cpu"),
            ["offload_optimizer.device", "none", "cpu", "deepspeed.offload"],
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            (),
            ["NVMe", "offload_optimizer"],
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            (),
            ["offload_optimizer", "deepspeed.offload=cpu"],
        ),
        ({"bfloat16": {"enabled": True}}, (), ["bf16", "precision=fp32"]),
        ({"zero_optimization": 3}, (), ["zero_optimization is 3", "object"]),
        ({"fp16": "yes"}, (), ["fp16 is 'yes'", "object"]),
        ("{'a': 1}", (), ["not JSON"]),
        ("[1]", (), ["list"]),
    ],
)
def test_a_contradiction_names_the_key_both_values_and_what_to_change(tmp_path, said, overrides, words):
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, said, *overrides, batch_size=16, world_size=4)
    for word in [*words, "ds.json"]:
        assert word in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"deepspeed\.config='/no/ds.json' can't be read: No such file"):
        made(tmp_path, None, "deepspeed.config=/no/ds.json")
