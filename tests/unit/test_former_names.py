"""Names of checkpoints in which torch.compile's `_orig_mod` stands, and which names here they mean."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.former import matched


@pytest.mark.parametrize(
    ("saved", "here", "right"),
    [
        (["0._orig_mod.weight", "2.bias"], ["0.weight", "2.bias"], {"0._orig_mod.weight": "0.weight"}),
        (["user.ema/a/_orig_mod.w"], ["user.ema/a/w"], {"user.ema/a/_orig_mod.w": "user.ema/a/w"}),
        (["own._orig_mod.weight"], ["own._orig_mod.weight"], {}),
        (["a._orig_mod._orig_mod.w"], ["a._orig_mod.w"], {"a._orig_mod._orig_mod.w": "a._orig_mod.w"}),
        (["0._orig_mod.weight", "0.weight"], ["0.weight"], {}),
        (["0.my_orig_mod.weight"], ["0.my.weight"], {}),
        (["0._orig_mod.weight"], ["1.weight"], {}),
    ],
)
def test_names_that_differ_by_it_alone_are_the_same(saved: list[str], here: list[str], right: dict[str, str]) -> None:
    assert matched(saved, here) == right
