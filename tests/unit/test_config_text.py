"""Text and types: what YAML and command-line scalars become."""

from __future__ import annotations

import json
import math
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config.convert import convert, expected
from phalanx.config.schema import JobConfig
from phalanx.config.text import Plain, free, is_null, number
from phalanx.config.tree import leaves
from phalanx.config.yamlfile import parse_flow, read_file, write
from phalanx.errors import ConfigError

# YAML 1.1 loaders and OmegaConf make numbers, bools or infinity of these.
IDS = ["0123", "4821_7", "123e456", "12:00:00", "30:00", "on", "no", "yes", "0x10", "0o17", "1_000", "inf", "nan"]
IDS += [".inf", "+1", "01e3", "2024-01-02", "1e", "e5", "--1", "1,5", "١٢"]


@pytest.mark.parametrize("text", IDS)
def test_free_form_keeps_text_that_is_no_json_number(text: str) -> None:
    assert free(Plain(text)) == text
    assert type(free(Plain(text))) is str


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("9e-1", 0.9), ("0.999", 0.999), ("1E5", 1e5), ("-2.5e+3", -2500.0), ("2e0", 2.0)],
)
def test_scientific_notation_is_a_float(text: str, value: float) -> None:
    assert free(Plain(text)) == value
    assert type(free(Plain(text))) is float
    assert convert(Plain(text), float) == value


@pytest.mark.parametrize("text", ["0", "-0", "10", "-7", "123456789012345678901234567890"])
def test_integers_are_exact(text: str) -> None:
    assert free(Plain(text)) == int(text)
    assert type(free(Plain(text))) is int


def test_words_of_yaml_1_2_core_schema() -> None:
    assert [free(Plain(word)) for word in ("true", "True", "TRUE")] == [True] * 3
    assert [free(Plain(word)) for word in ("false", "False", "FALSE")] == [False] * 3
    assert [free(Plain(word)) for word in ("", "~", "null", "Null", "NULL")] == [None] * 5
    assert [free(Plain(word)) for word in ("tRUE", "nUll", "None", "y", "off")] == ["tRUE", "nUll", "None", "y", "off"]


@pytest.mark.parametrize("text", ["1e-3", "10", "true", "null", "~", ""])
def test_quoted_text_stays_text(text: str) -> None:
    assert free(text) == text
    assert not is_null(text)


def test_numbers_too_long_for_int_stay_text() -> None:
    digits = "9" * 5000
    assert free(Plain(digits)) == digits


@settings(deadline=None)
@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_every_json_number_is_read_as_json_reads_it(value: float) -> None:
    assert number(json.dumps(value)) == value
    assert type(number(json.dumps(value))) is type(value)


@settings(deadline=None)
@given(st.text("0123456789+-.eE_:xn", max_size=8))
def test_number_agrees_with_json_on_what_is_a_number(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, (int, float)) and math.isfinite(value):
        assert number(text) == value
    elif (lax := number(text)) is not None:  # only a real in YAML's or Python's other spelling
        assert lax == float(text)
        assert re.search(r"[.eE]", text)
        assert not re.match(r"[+-]?0\d", text)
        assert "_" not in text


@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", 0.5), ("-.5", -0.5), ("5.", 5.0), ("1.e-3", 0.001), ("+1e-3", 0.001), ("+.5E2", 50.0), ("+1.5", 1.5)],
)
def test_reals_that_json_would_spell_otherwise(text: str, value: float) -> None:
    assert free(Plain(text)) == value
    assert type(free(Plain(text))) is float


@pytest.mark.parametrize("text", ["1e3", "4821_7", "0x10", "1.0", "010", "", "ten", "1_0", " 1", "1 "])
def test_integer_fields_refuse_what_may_mean_something_else(text: str) -> None:
    with pytest.raises(ValueError, match="accumulate"):
        JobConfig.model_validate({"accumulate": text})


@pytest.mark.parametrize(("value", "right"), [("10", 10), (Plain("3"), 3), (7, 7), ("+2", 2)])
def test_integer_fields(value: object, right: int) -> None:
    assert JobConfig.model_validate({"accumulate": value}).accumulate == right


@pytest.mark.parametrize("value", [True, 2.0, [1], 0, -1])
def test_integer_fields_refuse_other_python_types_and_bounds(value: object) -> None:
    with pytest.raises(ValueError, match="accumulate"):
        JobConfig.model_validate({"accumulate": value})


@pytest.mark.parametrize("word", ["true", "yes", "on", "1"])
def test_bool_fields_take_the_usual_words_of_any_case(word: str) -> None:
    no = {"true": "false", "yes": "no", "on": "off", "1": "0"}[word]
    for spelling in (str.lower, str.upper, str.title):
        assert JobConfig.model_validate({"progress": spelling(word)}).progress is True
        assert JobConfig.model_validate({"progress": spelling(no)}).progress is False


@pytest.mark.parametrize("value", ["2", "t", "y", "", "truee", 1])
def test_bool_fields_refuse_other_words(value: object) -> None:
    with pytest.raises(ValueError, match="progress"):
        JobConfig.model_validate({"progress": value})


@pytest.mark.parametrize("text", [*IDS, "1e-3", "10", "true", "#1", "a: b"])
def test_text_fields_keep_text(text: str) -> None:
    config = JobConfig.model_validate({"name": Plain(text), "env": {"A": Plain(text)}})
    assert config.name == config.env["A"] == text
    assert type(config.name) is type(config.env["A"]) is str


def test_environment_variables_are_always_text() -> None:
    env = {"A": Plain("null"), "B": Plain(""), "C": Plain("true"), "D": 1, "E": "~"}
    assert JobConfig.model_validate({"env": env}).env == {"A": "null", "B": "", "C": "true", "D": "1", "E": "~"}


@pytest.mark.parametrize("value", ["Block,Embedding", "Block, Embedding", "[Block, Embedding]", ["Block", "Embedding"]])
def test_list_fields(value: object) -> None:
    assert JobConfig.model_validate({"fsdp": {"wrap": value}}).fsdp.wrap == ("Block", "Embedding")


def test_what_is_expected_in_words() -> None:
    fields = JobConfig.model_fields
    words = {name: expected(fields[name].annotation, fields[name].metadata) for name in fields}
    assert words["accumulate"] == "an integer ≥ 1"
    assert words["precision"] == "one of fp32, bf16, fp16"
    assert words["progress"] == "true or false"
    assert words["master_port"] == "an integer ≥ 1 and ≤ 65535 or null"
    assert words["nproc_per_node"] == "an integer ≥ 1, auto, gpu, cpu or null"
    assert expected(float) == "a number"


# YAML files


def read(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return {".".join(path): leaf for path, leaf in leaves(read_file(file))}


def test_quoting_and_lines_are_kept(tmp_path) -> None:
    found = read(tmp_path, "a: 1e-3\nb:\n  c: '1e-3'\n  d: [0123, \"5\"]\n")
    assert {key: leaf.origin for key, leaf in found.items()} == {
        key: f"{tmp_path}/a.yaml:{line}" for key, line in {"a": 1, "b.c": 3, "b.d": 4}.items()
    }
    assert free(found["a"].value) == 0.001
    assert free(found["b.c"].value) == "1e-3"
    assert free(found["b.d"].value) == ["0123", "5"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("!!str 5", "5"),
        ("!!int 5", 5),
        ("|\n  x\n  y\n", "x\ny\n"),
        (">-\n  x\n  y\n", "x y"),
        ("", None),
        ("# c", None),
    ],
)
def test_tags_and_blocks(tmp_path, text: str, value: object) -> None:
    assert free(read(tmp_path, f"a: {text}")["a"].value) == value


def test_anchors_and_merge_keys(tmp_path) -> None:
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 5, z: 6}\none: {<<: *b, y: 3}\ntwo: {<<: [*b, *o]}\n"
    found = {key: free(leaf.value) for key, leaf in read(tmp_path, text).items()}
    assert (found["one.x"], found["one.y"]) == (1, 3)
    # The merge key's definition: of several mappings, earlier ones have precedence.
    assert (found["two.x"], found["two.y"], found["two.z"]) == (1, 2, 6)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~"])
def test_a_file_without_settings_is_empty(tmp_path, text: str) -> None:
    assert read(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: [1\n", 3, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\nb: 2\n'a': 3\n", 3, "'a' stands twice"),
        ("a:\n  b: 1\n  b: 1\n", 3, "'b' stands twice"),
        ("- 1\n", 1, "expected a mapping"),
        ("text\n", 1, "expected a mapping"),
        ("a: 1\n? [1]\n: 2\n", 2, "a key must be text"),
        ("a: *x\n", 1, "undefined alias"),
        ("a: &a [*a]\n", 1, "holds itself"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: !foo 1\n", 1, "'!foo' has no meaning"),
    ],
)
def test_faults_name_file_and_line(tmp_path, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/a.yaml:{line}: ")


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nix.yaml' does not exist"):
        read_file(tmp_path / "nix.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path)
    with pytest.raises(ConfigError, match="not valid YAML"):
        read(tmp_path, b"a: \xff\xfe\n")
    with pytest.raises(ConfigError, match="nested too deeply"):
        read(tmp_path, "a: &a {<<: *a}")


@pytest.mark.parametrize("text", ["[a", "[a]b", "{{x}}", "a", "", "[" * 1000, "'[a]'", "{a: 1, a: 2}"])
def test_flow_collections_only(text: str) -> None:
    assert parse_flow(text) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_what_is_written_reads_back_with_its_types(tmp_path_factory, value: object) -> None:
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    file.write_text(write({"a": [value]}), encoding="utf-8", newline="\n")
    (_, leaf), *_ = leaves(read_file(file))
    assert repr(free(leaf.value)) == repr([value])


@pytest.mark.parametrize(
    "text", ["\x85", "a\u2028b", "\ufeff", "\x00", "\r\n", " x ", "\t", "🙂", "<<", "=", "- a", "? b", "---"]
)
def test_awkward_text_reads_back(tmp_path, text: str) -> None:
    found = read(tmp_path, write({"a": {text: [text]}}))
    assert found == {f"a.{text}": found[f"a.{text}"]}
    assert free(found[f"a.{text}"].value) == [text]


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_written_text_is_text_for_other_yaml_readers_too(text: str) -> None:
    assert yaml.safe_load(write({"a": text})) == {"a": text}
