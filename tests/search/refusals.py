"""What the product is known to refuse, and where. Any other refusal is a finding."""

from __future__ import annotations

import re

from tests.search.ranks import Place

# By the beginning of the strategy's name: words of the errors.
KNOWN = {
    "": (
        "fewer than the \\d ranks that share them",
        "drop_last=True leaves nothing of",
        "number of samples, which this batch doesn't tell",
        "no batch of none|no batch without samples can be made",
    ),
    "fsdp": ("find_unused_parameters=true needs torch 2.13",),
    "deepspeed": (
        "trains one model with one optimizer",
        "holds parameters of other models too",
        "is trainable, but in no group of",
        "ZeRO clips by the 2-norm only",
        "would give Adagrad flat pieces",
        "fp16 engine at deepspeed.zero_stage=0 keeps its fp32 weights",
        "DeepSpeed has no fp16 on a CPU",
        "reduces gradients of float32, bfloat16 and float16 only",
        "can't shard \\w+, a parameter of no dimension",
        "a backward pass after run.clip_grad_norm\\(\\) without",
    ),
}


def known(place: Place, words: str) -> bool:
    return any(
        re.search(pattern, words)
        for name, patterns in KNOWN.items()
        if place.strategy.startswith(name)
        for pattern in patterns
    )
