"""Layers of settings: who wins, where values come from, and what is refused."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import RESERVED, JobConfig, Loaded, keys, load_config, load_run_config, save_run_config
from phalanx.config.interpolate import escape
from phalanx.errors import ConfigError
from phalanx.secret import is_secret

NOW = datetime(2031, 2, 3, 4, 5, 6)


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "a.yaml"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return write


def load(*overrides, files=(), environ=None, script=None):
    return load_config(files, overrides, environ or {}, script=script or {}, now=NOW)


def fault(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


def test_each_layer_wins_over_those_below(write, tmp_path) -> None:
    site = write("seed: 2\nprecision: bf16\n", "site.yaml")
    user = write("seed: 3\n", "xdg/phalanx/config.yaml")
    one, two = write("seed: 4\n", "one.yaml"), write("# two\nseed: 5\n", "two.yaml")
    environ = {"PHALANX_SITE": str(site)}
    xdg = {"XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    steps = [
        (load(), 0, "default"),
        (load(script={"seed": 1}), 1, "phalanx.init()"),
        (load(environ=environ, script={"seed": 1}), 2, f"site profile {site}:1"),
        (load(environ=environ | xdg), 3, f"user file {user}:1"),
        (load(files=[one], environ=environ | xdg), 4, f"{one}:1"),
        (load(files=[one, two], environ=environ | xdg), 5, f"{two}:2"),
        (load(files=[two], environ=xdg | {"PHALANX_SEED": "6"}), 6, "environment PHALANX_SEED"),
        (load("seed=7", files=[two], environ={"PHALANX_SEED": "6"}), 7, "command line"),
        (load("seed=7", ("seed", "8")), 8, "command line"),
    ]
    assert [(loaded.config.seed, loaded.origins["seed"]) for loaded, *_ in steps] == [tuple(s[1:]) for s in steps]
    assert load(environ=environ).config.precision == "bf16"


def test_user_file_by_the_xdg_specification(write, tmp_path, monkeypatch) -> None:
    write("seed: 3\n", "home/.config/phalanx/config.yaml")
    write("seed: 9\n", "rel/phalanx/config.yaml")
    monkeypatch.chdir(tmp_path)
    home = {"HOME": str(tmp_path / "home")}
    assert load(environ=home).config.seed == 3
    assert load(environ=home | {"XDG_CONFIG_HOME": ""}).config.seed == 3
    assert load(environ=home | {"XDG_CONFIG_HOME": "rel"}).config.seed == 3  # relative: to be ignored
    assert load(environ=home | {"XDG_CONFIG_HOME": str(tmp_path / "none")}).config.seed == 0
    assert load(environ={}).config.seed == 0


def test_sections_and_params_merge_deeply_and_lists_replace(write) -> None:
    one = write("checkpoint: {keep: 5}\nparams: {optim: {name: adam, betas: [1, 2, 3]}}\nenv: {A: 1}\n", "1.yaml")
    two = write("checkpoint: {every_steps: 9}\nparams: {optim: {betas: [4]}}\nenv: {B: 2}\n", "2.yaml")
    config = load("params.optim.lr=1e-3", "env.C=0123", files=[one, two]).config
    assert (config.checkpoint.keep, config.checkpoint.every_steps) == (5, 9)
    assert config.params == {"optim": {"name": "adam", "betas": [4], "lr": 0.001}}
    assert config.env == {"A": "1", "B": "2", "C": "0123"}


def test_params_may_change_their_form_between_files(write) -> None:
    one, two = write("params: {optim: adam, x: {y: 1}}", "1.yaml"), write("params: {optim: {lr: 1}, x: ~}", "2.yaml")
    assert load(files=[one, two]).config.params == {"optim": {"lr": 1}, "x": None}


def test_sections_with_nothing_in_them_change_nothing(write) -> None:
    loaded = load(files=[write("checkpoint:\nparams:\nenv: {}\nfsdp: {}\n")])
    assert loaded.config == JobConfig()


def test_dashes_aliases_and_dotted_keys(write) -> None:
    config = load(files=[write("num-nodes: 2\nrun_name: x\ncheckpoint.every-steps: 3\nparams.a-b: 1\n")]).config
    assert (config.nodes, config.name, config.checkpoint.every_steps) == (2, "x", 3)
    assert config.params == {"a-b": 1}
    assert load("dist_strat=ddp").config.strategy == load("distributed-strategy=ddp").config.strategy == "ddp"
    assert load("nproc=2", "num_tasks_per_node=3").config.ntasks_per_node == 3


def test_one_file_that_sets_a_key_in_two_spellings(write) -> None:
    assert "nodes" in fault(files=[write("nodes: 2\nnum_nodes: 4\n")])
    assert "set twice" in fault(files=[write("checkpoint.keep: 2\ncheckpoint: {keep: 3}\n")])
    assert "set twice" in fault(files=[write("params: {a: 1}\nparams.a.b: 3\n")])


# Values of the command line

HOSTILE = [
    "runs/epoch=3-step=40.ckpt",
    "#1",
    "node[01-03]",
    "m_0:1,m_1:1",
    "a@b.c",
    "'quoted'",
    '"quoted"',
    "a b",
    "a: b",
    "- x",
    "*x",
    "&x",
    "!x",
    "%x",
    "@x",
    "`x`",
    "Straße 北京",
    "$HOME",
    "a\\b",
    "x #1",
    "=",
    "12:00:00",
    "30:00",
    "123e456",
    "4821_7",
    "0123",
    "on",
    "no",
    "[a",
    "{a",
    "two\nlines",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_values_are_literal(text: str) -> None:
    config = load(f"name={text}", ("params.x", text), f"env.X={text}").config
    assert (config.name, config.params["x"], config.env["X"]) == (text, text, text)


IDS = ["1234e56", "12e4", "0e12345", "00e1234", "12345e3", "3e08", "123e456", "1e99999", "0123", "4821_7", "12:00:00"]


@pytest.mark.parametrize("text", IDS)
def test_an_id_of_digits_stays_what_it_is_and_quotes_around_it_are_none_of_it(text: str) -> None:
    given = [f"params.a={text}", f"params.b='{text}'", f'params.c="{text}"', f"params.d=[{text}]"]
    assert load(*given).config.params == {"a": text, "b": text, "c": text, "d": [text]}
    environ = {"PHALANX_PARAMS__A": text, "PHALANX_PARAMS__B": f'"{text}"'}
    assert load_config((), (), environ).config.params == {"a": text, "b": text}


@pytest.mark.parametrize("text", ["1.10", "7", "-3", "1e-3", "true", "null", "~"])
def test_quotes_on_the_command_line_keep_text_what_would_be_none(text: str) -> None:
    assert load(f"params.a='{text}'", f'params.b="{text}"').config.params == {"a": text, "b": text}


@pytest.mark.parametrize(
    "text", ["1e-3", "1e-04", "1e6", "2.5e3", "5e-5", "1E5", "1e+06", "0e0", "0.1", "3.14159265358979323846"]
)
def test_numbers_as_they_are_written_stay_numbers(text: str) -> None:
    (value,) = load(f"params.lr={text}").config.params.values()
    assert type(value) is float
    assert value == float(text)


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1))
def test_any_text_of_the_command_line_is_literal(text: str) -> None:
    config = load(f"env.X={escape(text)}", ("run_root", f"x{escape(text)}")).config
    assert config.env["X"] == text
    assert config.run_root == "x" + text


@pytest.mark.parametrize("key", ["params.optim.lr", "params.lr"])
def test_scientific_notation_in_files_and_on_the_command_line(write, key: str) -> None:
    text = "params: {lr: 1e-3, optim: {lr: 1e-3, betas: [9e-1, 0.999]}}"
    for config in (load(f"{key}=1e-3").config, load(files=[write(text)]).config):
        value = config.params
        for name in key.split(".")[1:]:
            value = value[name]
        assert value == 0.001
        assert type(value) is float
    assert load(files=[write(text)]).config.params["optim"]["betas"] == [0.9, 0.999]


def test_times_and_ids_in_files_stay_text(write) -> None:
    text = "name: 12:00:00\nrun_root: 0123\nparams: {time: 12:00:00, short: 30:00, id: 123e456, job: 4821_7}\n"
    config = load("env.T=12:00:00", files=[write(text)]).config
    assert (config.name, config.run_root, config.env["T"]) == ("12:00:00", "0123", "12:00:00")
    assert config.params == {"time": "12:00:00", "short": "30:00", "id": "123e456", "job": "4821_7"}


def test_collections_on_the_command_line() -> None:
    config = load(
        "params.a=[1, 2e3, 'x', \"5\", [on]]", "params.b={c: 1, d: {e: ~}}", "fsdp.wrap=[A, B]", "trackers=csv"
    ).config
    assert config.params == {"a": [1, 2000.0, "x", "5", ["on"]], "b": {"c": 1, "d": {"e": None}}}
    assert config.fsdp.wrap == ("A", "B")
    assert config.trackers == ("csv",)
    assert load("checkpoint={keep: 2}", "params={lr: 1}").config.checkpoint.keep == 2


def test_null_and_empty_values() -> None:
    config = load("name=x", "name=null", "resume=", "params.a=null", "params.b=", "env.C=").config
    assert (config.name, config.resume, config.params, config.env) == (None, None, {"a": None, "b": ""}, {"C": ""})


@pytest.mark.parametrize("override", ["nodes", "=3", ""])
def test_overrides_have_a_key_and_a_value(override: str) -> None:
    assert "expected key=value" in fault(override)


def test_a_section_has_no_value(write) -> None:
    for text in (fault("checkpoint=5"), fault("checkpoint=[1]"), fault(files=[write("checkpoint: 5")])):
        assert "checkpoint is a section; set checkpoint.every_steps, checkpoint.keep" in text
    assert "set params.NAME" in fault("params=5")
    assert "expected an integer ≥ 1, not a mapping" in fault(files=[write("nodes: {a: 1}")])
    assert "expected text" in fault(files=[write("env: {A: {B: 1}}")])
    assert "expected text" in fault(files=[write("env: {A: [1]}")])


def test_an_item_of_a_list_cannot_be_set_alone(write) -> None:
    text = fault("params.betas.0=1", files=[write("params: {betas: [1, 2]}")])
    assert "params.betas is a list" in text


# Faults


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("precison", "precision"),
        ("acumulate", "accumulate"),
        ("checkpoint.every_step", "checkpoint.every_steps"),
        ("every_steps", "checkpoint.every_steps"),
        ("chekpoint.keep", "checkpoint.keep"),
        ("num_node", "num_nodes"),
        ("parms", "params"),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, nearest: str) -> None:
    message = fault(f"{key}=1")
    assert f"unknown key {key!r} (command line)" in message
    assert f"Did you mean {nearest!r}?" in message


def test_unknown_keys_name_where_they_stand_and_point_to_params(write) -> None:
    file = write("seed: 1\n\noptim:\n  lr: 1\n")
    message = fault(files=[file])
    assert f"unknown key 'optim' ({file}:3)" in message
    assert "params.optim" in message
    assert "environment PHALANX_PRECISON" in fault(environ={"PHALANX_PRECISON": "bf16"})
    assert "phalanx.init()" in fault(script={"acumulate": 2})
    assert "params" not in fault("checkpoint.every_step=1").partition("Did you mean")[2]


def test_wrong_types_name_value_key_origin_and_what_is_expected(write) -> None:
    file = write("seed: 1\naccumulate: 1e3\n")
    assert fault(files=[file]) == f"accumulate = '1e3' ({file}:2): expected an integer ≥ 1"
    assert fault("precision=fp23") == "precision = 'fp23' (command line): expected one of fp32, bf16, fp16"
    assert fault("nproc=x") == ("nproc_per_node = 'x' (command line): expected an integer ≥ 1, auto, gpu, cpu or null")
    assert "accumulate = 2.5 (phalanx.init()): expected an integer" in fault(script={"accumulate": 2.5})
    assert "run_root = 'null' (command line): expected text" in fault("run_root=null")
    assert "list of texts" in fault(files=[write("fsdp: {wrap: [{a: 1}]}")])


def test_unknown_names_come_with_the_list_and_the_nearest() -> None:
    message = fault("strategy=dpd", "launcher=torchrum", "trackers=cvs")
    wanted = "expected one of auto, single, ddp, fsdp, deepspeed, horovod. Did you mean 'ddp'?"
    assert f"strategy = 'dpd' (command line): {wanted}" in message
    assert "Did you mean 'torchrun'?" in message
    assert "Did you mean 'csv'?" in message
    assert message.count("(command line)") == 3


def test_all_faults_are_reported_together(write) -> None:
    message = fault(
        "checkpoint=5", "name=${nix}", files=[write("precison: x\nseed: -1\n")], environ={"PHALANX_NODES": "0"}
    )
    for part in ("5 faults", "precison", "seed = '-1'", "checkpoint is a section", "${nix}", "nodes = '0'"):
        assert part in message


def test_missing_and_broken_files(write, tmp_path) -> None:
    message = fault(files=["nix.yaml", write("a: [")])
    assert "'nix.yaml' does not exist" in message
    assert f"{tmp_path}/a.yaml:1: not valid YAML" in message
    assert "nix.yaml" in fault(environ={"PHALANX_SITE": "nix.yaml"})


# Environment


def test_settings_from_environment_variables() -> None:
    environ = {
        "PHALANX_CHECKPOINT__EVERY_STEPS": "10",
        "PHALANX_RUN_NAME": "x",
        "PHALANX_ENV__NCCL_DEBUG": "INFO",
        "PHALANX_PARAMS__LR": "1e-3",
        "PHALANX_SEED": "",
        "OTHER": "1",
    }
    config = load(environ=environ).config
    assert (config.checkpoint.every_steps, config.name, config.seed) == (10, "x", 0)
    assert config.env == {"NCCL_DEBUG": "INFO"}
    assert config.params == {"lr": 0.001}


def test_reserved_variables_are_no_settings() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK NUM_NODES MASTER_ADDR MASTER_PORT RUN_DIR"
    for name in [*names.split(), "CPUS_PER_RANK", "NUM_WORKERS_AUTO"]:
        assert f"PHALANX_{name}" in RESERVED
        assert load(environ={f"PHALANX_{name}": "7"}).config == JobConfig()


# The script's arguments


def test_script_arguments_are_python_values() -> None:
    config = load(
        script={"accumulate": 2, "fsdp": {"wrap": "Block"}, "params": {"lr": 1e-3, "id": "0123", "t": (1, 2)}}
    ).config
    assert (config.accumulate, config.fsdp.wrap) == (2, ("Block",))
    assert config.params == {"lr": 0.001, "id": "0123", "t": (1, 2)}


def test_overridden_script_arguments_are_listed() -> None:
    loaded = load(
        "precision=bf16",
        "accumulate=2",
        "fsdp.wrap=B",
        script={"precision": "fp32", "accumulate": 2, "fsdp": {"wrap": "A"}},
    )
    assert loaded.overridden == (
        "precision='fp32' of phalanx.init() is overridden by 'bf16' (command line)",
        "fsdp.wrap=('A',) of phalanx.init() is overridden by ('B',) (command line)",
    )
    assert loaded.config.precision == "bf16"
    assert load(script={"precision": "bf16"}).overridden == ()


def test_overridden_script_arguments_are_checked_too() -> None:
    assert "accumulate = 0 (phalanx.init())" in fault("accumulate=2", script={"accumulate": 0})


@pytest.mark.parametrize("key", ["strategy", "dist_strat"])
def test_a_strategy_that_contradicts_the_scripts(key: str) -> None:
    message = fault(f"{key}=ddp", script={"strategy": "fsdp"})
    assert "'fsdp' of phalanx.init() contradicts strategy='ddp' (command line)" in message
    assert load(f"{key}=fsdp", script={"strategy": "fsdp"}).config.strategy == "fsdp"
    left_open = load(f"{key}=ddp", script={"strategy": "auto"})
    assert (left_open.config.strategy, left_open.overridden) == ("ddp", ())
    assert load(f"{key}=auto", script={"strategy": "fsdp"}).config.strategy == "fsdp"


# Run directories


def same(one, two) -> bool:
    return one.config == two.config and one.origins == two.origins


def test_a_run_directory_gives_back_types_and_origins(write, tmp_path) -> None:
    file = write(
        "params: {a: '0123', b: 'true', c: '1e-3', d: 1e-3, e: 'null', f: [1, '1'], g: {}, h: ''}\nname: 0123\n"
    )
    loaded = load("env.A=true", r"env.B=\${X}", "params.s=${checkpoint}", "resume=null", files=[file])
    save_run_config(loaded, tmp_path)
    again = load_run_config(tmp_path)
    assert same(loaded, again)
    assert repr(again.config.params) == repr(loaded.config.params)
    assert load(files=[tmp_path / "config.yaml"]).config == loaded.config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "config.yaml", "origins.json"]


def test_a_rank_sees_the_launch_above_the_script(tmp_path) -> None:
    save_run_config(load("precision=bf16", "params.lr=2", script={"accumulate": 9}), tmp_path)
    assert "accumulate" not in (tmp_path / "config.yaml").read_text()
    again = load_run_config(tmp_path, {"precision": "fp16", "accumulate": 2, "params": {"lr": 1, "wd": 3}})
    assert (again.config.precision, again.config.accumulate) == ("bf16", 2)
    assert again.config.params == {"lr": 2, "wd": 3}
    assert len(again.overridden) == 2
    assert again.origins["precision"] == "command line"
    save_run_config(load("strategy=ddp"), tmp_path)
    with pytest.raises(ConfigError, match="contradicts"):
        load_run_config(tmp_path, {"strategy": "fsdp"})


def test_a_run_directory_without_settings(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"config.yaml' does not exist"):
        load_run_config(tmp_path)
    save_run_config(load(), tmp_path)
    assert load_run_config(tmp_path).config == JobConfig()


def test_a_failed_save_leaves_the_old_files(tmp_path, monkeypatch) -> None:
    save_run_config(load("seed=1"), tmp_path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_run_config(load("seed=2"), tmp_path)
    assert load_run_config(tmp_path).config.seed == 1
    assert len(list(tmp_path.iterdir())) == 2


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: not is_secret(name)),  # the value of a secret is in no file
        st.text() | st.integers() | st.booleans() | st.none(),
        max_size=4,
    ),
    st.text(),
)
def test_any_settings_survive_a_run_directory(tmp_path_factory, params: dict, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "run"
    folder.mkdir(exist_ok=True)
    script = {"params": {key: escape(value) if isinstance(value, str) else value for key, value in params.items()}}
    config = load(("env.X", escape(text)), script=script).config
    loaded = Loaded(config, {"env.X": "a:1", **{f"params.{key}": "a:1" for key in params}})
    save_run_config(loaded, folder)
    again = load_run_config(folder).config
    assert repr(again.params) == repr(params)
    assert again.env == {"X": text}


def test_keys_lists_every_setting() -> None:
    assert keys()["checkpoint.every_steps"].default is None
    assert keys()["checkpoint.every_steps"].description
    assert keys()["fsdp.wrap"].default == ("auto",)
    assert {"params", "env", "seed"} < keys().keys()
    assert "checkpoint" not in keys()
    assert all(field.description for field in keys().values())
    assert load().origins.keys() == keys().keys()


@pytest.mark.parametrize("pattern", ["{epoch}", "{epoch:02d}", "{epoch}-{step}", "[01-"])
def test_a_file_names_pattern_is_no_mapping(pattern: str) -> None:
    assert load_config(overrides=[f"params.out={pattern}"], environ={}).config.params["out"] == pattern


def test_a_default_number_can_stand_in_a_text() -> None:
    loaded = load_config(overrides=["name=${seed}", "params.same=${seed}"], environ={})
    assert (loaded.config.name, loaded.config.params["same"]) == ("0", 0)
