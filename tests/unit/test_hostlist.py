"""Slurm's compressed host and task lists."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import TopologyError
from phalanx.rank.hostlist import expand_counts, expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("cn01", ["cn01"]),
        ("", []),
        # a comma inside brackets does not end a name
        ("cn[4,9]", ["cn4", "cn9"]),
        ("cn[4,9],cn2", ["cn4", "cn9", "cn2"]),
        # hyphens in plain names are not ranges
        ("c427-032,c429-002", ["c427-032", "c429-002"]),
        # plain names mixed with brackets
        ("h-a,h-b[001,003],h-c", ["h-a", "h-b001", "h-b003", "h-c"]),
        # two bracket groups: the first turns slowest
        ("rack[0-1]b[01-02]", ["rack0b01", "rack0b02", "rack1b01", "rack1b02"]),
        ("a[0-1][0-1]", ["a00", "a01", "a10", "a11"]),
        # zero padding follows the lower bound
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[1-2,010]", ["n1", "n2", "n010"]),
        # text after a bracket, names with dots
        ("gpu[1-2].x.org,login.x.org", ["gpu1.x.org", "gpu2.x.org", "login.x.org"]),
        ("n[2-2]i", ["n2i"]),
        # order and repetition are kept
        ("z[3,1],a,z2,a", ["z3", "z1", "a", "z2", "a"]),
    ],
)
def test_a_list_expands_in_its_order(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "cn[1-2", "cn1]", "cn[]", "cn[1-]", "cn[-1]", "cn[x]", "cn[3-1]", "cn[1--2]", "cn[1-2-3]", "cn[[1]]",
        "cn[0-8:2]", "cn[1,]", "cn1,,cn2", "cn1,", ",cn1", "cn1 cn2", "cn[0-65536]", "r[0-9999]n[0-9999]",
    ],
)  # fmt: skip
def test_a_malformed_list_is_named(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        expand_hostlist(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["n[00001-10000]", ",".join(f"host-{i}" for i in range(10_000))])
def test_ten_thousand_nodes_take_no_time(text: str) -> None:
    start = time.process_time()
    assert len(expand_hostlist(text)) == 10_000
    assert time.process_time() - start < 1.0


_names = st.text("abz-.", min_size=1, max_size=4)
_ranges = st.tuples(st.integers(0, 999), st.integers(0, 12), st.integers(1, 4))
_groups = st.lists(_ranges, min_size=1, max_size=3)
_items = st.lists(st.one_of(_names, _groups), min_size=1, max_size=3)


def _written(part: str | list[tuple[int, int, int]]) -> str:
    if isinstance(part, str):
        return part
    texts = [f"{low:0{w}d}-{low + more}" if more else f"{low:0{w}d}" for low, more, w in part]
    return "[" + ",".join(texts) + "]"


def _meant(item: list[str | list[tuple[int, int, int]]]) -> list[str]:
    hosts = [""]
    for part in item:
        if isinstance(part, str):
            hosts = [host + part for host in hosts]
        else:
            hosts = [
                f"{host}{n:0{max(w, len(str(low)))}d}"
                for host in hosts
                for low, more, w in part
                for n in range(low, low + more + 1)
            ]
    return hosts


@settings(max_examples=100, deadline=None)
@given(st.lists(_items, min_size=1, max_size=4))
def test_any_list_means_its_members(items: list[list[str | list[tuple[int, int, int]]]]) -> None:
    text = ",".join("".join(map(_written, item)) for item in items)
    assert expand_hostlist(text) == [host for item in items for host in _meant(item)]


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1]), ("4", [4]), ("3,2(x2)", [3, 2, 2]), ("0,2", [0, 2])],
)
def test_task_counts_expand(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "a", "2(x)", "2(x0)", "2x3", "-1", "2(x3", "1,,1", "1(x999999999)"])
def test_malformed_task_counts_are_named(text: str) -> None:
    with pytest.raises(TopologyError) as caught:
        expand_counts(text)
    assert repr(text) in str(caught.value)
