"""References between settings, to the environment and to the time."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import load_config
from phalanx.config.interpolate import escape, split
from phalanx.errors import ConfigError

NOW = datetime(2031, 2, 3, 4, 5, 6)


def load(*overrides: str, **environ: str):
    return load_config((), overrides, environ, now=NOW).config


def fault(*overrides: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **environ)
    return str(caught.value)


@pytest.mark.parametrize("key", ["seed", "checkpoint.every_steps", "params.a.b", "env.A"])
def test_any_setting_can_be_referred_to(key: str) -> None:
    assert load(f"{key}=7", f"name=x-${{{key}}}").name == "x-7"


def test_defaults_and_aliases_can_be_referred_to() -> None:
    config = load("name=${num_nodes}x${checkpoint.keep}", "run_root=${precision}/${progress}", "nodes=4")
    assert (config.name, config.run_root) == ("4x3", "fp32/true")


def test_references_see_the_final_value() -> None:
    assert load("name=s${seed}", "seed=1", "seed=2").name == "s2"


def test_a_whole_reference_keeps_the_type() -> None:
    config = load(
        "params.a=1e-3", "params.b=${params.a}", "params.c=[1, x]", "params.d=${params.c}", "params.e=${seed}"
    )
    assert config.params == {"a": 0.001, "b": 0.001, "c": [1, "x"], "d": [1, "x"], "e": 0}
    section = load("params.s=${checkpoint}", "checkpoint.keep=2").params["s"]
    assert (section["every_steps"], section["keep"]) == (None, 2)
    assert load("params.a={x: {y: 1}}", "params.b=${params.a}").params["b"] == {"x": {"y": 1}}
    assert load("seed=5", "accumulate=${seed}").accumulate == 5


def test_quoted_text_stays_text_through_references(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "params:\n  id: '0123'\n  n: '7'\n  copy: ${params.n}\n  wrapped: \"${params.lr}\"\n  lr: 1e-3\n"
        '  digits: "${params.n}${params.n}"\n  number: ${params.n}${params.n}\n  list:\n'
        '    ["${params.n}", "${params.lr}"]\n'
        '  quoted: "${oc.env:N}"\n  plain: ${oc.env:N}\n'
    )
    params = load_config([file], (), {"N": "5"}).config.params
    assert params["copy"] == "7"
    assert params["wrapped"] == 0.001
    assert params["digits"] == "77"
    assert params["number"] == 77
    assert params["list"] == ["7", 0.001]
    assert params["quoted"] == "5"
    assert params["plain"] == 5


def test_environment_variables_and_their_defaults() -> None:
    config = load(
        "params.a=${oc.env:N}", "params.b=${oc.env:X,1e-3}", "params.c=${oc.env:X,a,b}", "seed=${oc.env:N}", N="5"
    )
    assert config.params == {"a": 5, "b": 0.001, "c": "a,b"}
    assert config.seed == 5
    assert load("params.u=/scratch/${oc.env:USER}/x", USER="me").params["u"] == "/scratch/me/x"
    assert load("name=${oc.env:X,${seed}}", "seed=3").name == "3"
    assert load("params.a=${oc.env:N,${nix}}", N="1").params["a"] == 1


def test_time_is_one_for_the_whole_load() -> None:
    config = load("name=${now:%Y%m%d}", "run_root=runs/${now:%H:%M:%S}")
    assert (config.name, config.run_root) == ("20310203", "runs/04:05:06")
    without = load_config((), ["name=${now:%f}", "run_root=${now:%f}"], {}).config
    assert without.name == without.run_root


@pytest.mark.parametrize(
    ("text", "value"),
    [(r"\${x}", "${x}"), (r"\\${seed}", r"\0"), (r"\\\${x}", r"\${x}"), (r"a\b$c{d}", r"a\b$c{d}"), ("$${seed}", "$0")],
)
def test_escapes(text: str, value: str) -> None:
    assert load(f"name={text}").name == value


@settings(deadline=None)
@given(st.text("\\${}a:", max_size=12))
def test_escaped_text_is_what_it_was(text: str) -> None:
    assert split(escape(text)) == [(False, text)]


def test_a_circle_names_its_chain() -> None:
    message = fault("params.a=${params.b}", "params.b=x${params.c}", "params.c=${params.a}", "params.d=${params.a}")
    assert "params.a → params.b → params.c → params.a" in message
    assert message.count("circle") == 1
    assert "circle" in fault("name=${name}")
    assert "circle" in fault("params.a=${params}")


def test_unknown_references_name_the_nearest() -> None:
    assert "Did you mean 'precision'?" in fault("name=${precison}")
    assert "Did you mean 'params.lr'?" in fault("params.lr=1", "name=${params.lrr}")
    assert "${oc.env:HOME}" in fault("name=${HOME}", HOME="/h")
    assert "expected ${key}, ${oc.env:VAR} or ${now:FORMAT}" in fault("name=${env:HOME}")


def test_a_fault_is_reported_where_it_is() -> None:
    message = fault("name=${run_root}", "run_root=${nix}")
    assert message.startswith("run_root = '${nix}' (command line)")
    assert "faults" not in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["name=${seed"], "without '}'"),
        (["name=x${resume}"], "is unset"),
        (["params.a=[1]", "name=x${params.a}"], "not a single value"),
        (["name=x${checkpoint}"], "not a single value"),
        (["name=${oc.env:NIX}"], "'NIX' is not set"),
    ],
)
def test_what_cannot_be_part_of_a_text(overrides: list[str], message: str) -> None:
    assert message in fault(*overrides)
