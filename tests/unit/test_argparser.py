"""argparse with values from YAML files."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from phalanx import ArgumentParser


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "a.yaml") -> str:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def parser(*arguments: tuple, **kwargs) -> ArgumentParser:
    made = ArgumentParser(prog="train", **kwargs)
    for names, options in arguments:
        made.add_argument(*names.split(), **options)
    return made


def fails(capsys, made: ArgumentParser, *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        made.parse_args(list(words))
    assert caught.value.code == 2
    return capsys.readouterr().err


LR = ("--lr", {"type": float, "required": True})
LOG = ("--log-int", {"type": int, "default": 10})
NAME = ("--name", {})


def test_flags_win_over_later_files_over_earlier_ones_over_defaults(write) -> None:
    base = write("lr: 1e-3\nlog_int: 20\nname: base\n", "base.yaml")
    ddp = write("name: ddp\n", "ddp.yaml")
    made = parser(LR, LOG, NAME, ("--seed", {"type": int, "default": 5}))
    args = made.parse_args(["-c", base, "--config", ddp, "--log-int", "42"])
    assert vars(args) == {"lr": 0.001, "log_int": 42, "name": "ddp", "seed": 5}
    # Flags win wherever they stand, even if they give the default.
    assert made.parse_args(["--log-int", "10", f"--config={ddp}", "-c", base]).log_int == 10


def test_without_files_it_is_argparse(capsys) -> None:
    assert vars(parser(LR, LOG).parse_args(["--lr", "2"])) == {"lr": 2.0, "log_int": 10}
    assert "the following arguments are required: --lr" in fails(capsys, parser(LR, LOG))
    assert "unrecognized arguments: --nix\n" in fails(capsys, parser(LOG), "--nix")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log-intt", "3"], "unrecognized arguments: --log-intt 3. Did you mean '--log-int'?\n"),
        (["--lgo-int=3", "--nmae=x"], "--nmae=x. Did you mean '--log-int'? Did you mean '--name'?\n"),
        (["--deepsped"], "unrecognized arguments: --deepsped\n"),  # a launcher's, and nobody's to type
        (["log-int"], "unrecognized arguments: log-int\n"),
        (["--confg", "x.yaml"], "--confg x.yaml. Did you mean '--config'?\n"),
    ],
)
def test_a_misspelt_option_gets_the_nearest_named(capsys, words, said) -> None:
    assert fails(capsys, parser(LOG, NAME), *words).endswith(said)


def test_words_that_are_no_options_can_still_be_asked_for() -> None:
    args, rest = parser(LOG).parse_known_args(["--log-intt", "3"])
    assert (args.log_int, rest) == (10, ["--log-intt", "3"])
    made = parser(LOG, exit_on_error=False)
    with pytest.raises(argparse.ArgumentError, match="Did you mean '--log-int'"):
        made.parse_args(["--log-intt", "3"])


@pytest.mark.parametrize(
    "text", ["0123", "4821_7", "123e456", "12:00:00", "30:00", "1e-3", "on", "no", "true", "0x10", "inf"]
)
@pytest.mark.parametrize("kind", [None, str])
def test_text_stays_text(write, text: str, kind: type | None) -> None:
    made = parser(("--x", {"type": kind}), ("--y", {"type": kind, "nargs": "+"}))
    args = made.parse_args(["-c", write(f"x: {text}\ny: [{text}, {text}]\n")])
    assert (args.x, args.y) == (text, [text, text])


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (float, "1e-3", 0.001),
        (float, "10", 10.0),
        (int, "10", 10),
        (json.loads, "'{\"a\": [1]}'", {"a": [1]}),
        (lambda text: text + "!", "x", "x!"),
        (bool, "false", False),
        (bool, "No", False),
        (bool, "on", True),
        (bool, "1", True),
    ],
)
def test_the_arguments_own_type_converts_once(write, kind, text: str, value: object) -> None:
    found = parser(("--x", {"type": kind, "default": "?" if kind is str else None})).parse_args(
        ["-c", write(f"x: {text}\n")]
    )
    assert found.x == value
    assert type(found.x) is type(value)


def test_bool_type_on_the_command_line(capsys) -> None:
    made = parser(("--x", {"type": bool}))
    assert [made.parse_args(["--x", word]).x for word in ("False", "true", "0", "YES")] == [False, True, False, True]
    assert "invalid bool value: 'maybe'" in fails(capsys, made, "--x", "maybe")


@pytest.mark.parametrize("word", ["null", "~", ""])
def test_null_is_none_and_quoted_null_is_text(write, word: str) -> None:
    made = parser(("--x", {"default": "d"}), ("--y", {"type": int, "default": 3}), ("--z", {}))
    args = made.parse_args(["-c", write(f"x: {word}\ny: {word}\nz: '{word}'\n")])
    assert (args.x, args.y, args.z) == (None, None, word)


@pytest.mark.parametrize(
    ("options", "text", "value"),
    [
        ({"nargs": "+", "type": int}, "[1, 2]", [1, 2]),
        ({"nargs": "*", "type": float}, "[1e-3]", [0.001]),
        ({"nargs": "*"}, "[]", []),
        ({"nargs": "+"}, "a", ["a"]),
        ({"nargs": 2, "type": float}, "[9e-1, 0.999]", [0.9, 0.999]),
        ({"nargs": "?", "const": "c"}, "a", "a"),
        ({"action": "store_true"}, "true", True),
        ({"action": "store_true"}, "no", False),
        ({"action": "store_false"}, "false", False),
        ({"action": "store_false"}, "true", True),
        ({"action": argparse.BooleanOptionalAction}, "off", False),
        ({"action": argparse.BooleanOptionalAction}, "yes", True),
        ({"action": "count", "default": 0}, "3", 3),
        ({"action": "append", "type": int}, "[1, 2]", [1, 2]),
        ({"action": "append"}, "a", ["a"]),
        ({"action": "append", "nargs": 2, "type": int}, "[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
        ({"action": "append", "nargs": 2, "type": int}, "[1, 2]", [[1, 2]]),
        ({"action": "extend", "nargs": "+", "type": int}, "[1, 2]", [1, 2]),
        ({"action": "store_const", "const": 7, "default": 1}, "7", 7),
        ({"action": "store_const", "const": 7, "default": 1}, "true", 7),
        ({"action": "store_const", "const": 7, "default": 1}, "false", 1),
        ({"action": "append_const", "const": 7}, "[7]", [7]),
        ({"choices": ["a", "b"]}, "b", "b"),
        ({"choices": [1, 2], "type": int, "nargs": "+"}, "[2, 1]", [2, 1]),
    ],
)
def test_every_kind_of_argument(write, options: dict, text: str, value: object) -> None:
    args = parser(("--x", options)).parse_args(["-c", write(f"x: {text}\n")])
    assert args.x == value
    assert type(args.x) is type(value)


def test_the_scripts_own_action_gets_the_value(write) -> None:
    class Doubled(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            setattr(namespace, self.dest, values * 2)

    made = parser(("--x", {"action": Doubled, "type": int}))
    assert made.parse_args(["-c", write("x: 4")]).x == made.parse_args(["--x", "4"]).x == 8


def test_repeatable_flags_replace_the_files_values(write) -> None:
    made = parser(("--tag", {"action": "append"}), ("-v", {"action": "count", "default": 0}))
    args = made.parse_args(["-c", write("tag: [a, b]\nv: 3\n"), "--tag", "z", "-v"])
    assert (args.tag, args.v) == (["z"], 1)


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ({"type": int}, "1e3", "invalid int value: '1e3'"),
        ({"type": float}, "x", "invalid float value: 'x'"),
        ({"type": bool}, "maybe", "invalid bool value: 'maybe'"),
        ({"choices": ["a", "b"]}, "c", "invalid choice: 'c'"),
        ({"nargs": 2}, "[1]", "expected 2 values, got 1"),
        ({"nargs": "+"}, "[]", "at least one"),
        ({}, "[1]", "expected one value, not a list"),
        ({"nargs": "+"}, "[{a: 1}]", "not a mapping"),
        ({"action": "store_true"}, "3", "expected one of true, false, got '3'"),
        ({"action": "store_const", "const": 7}, "3", "expected one of true, false, 7, got '3'"),
        ({"action": "count"}, "-1", "expected a count"),
    ],
)
def test_values_that_do_not_fit_name_file_line_and_key(write, capsys, options: dict, text: str, message: str) -> None:
    file = write(f"# one\nx: {text}\n")
    error = fails(capsys, parser(("--x", options)), "-c", file)
    assert f"train: error: {file}:2: x: " in error
    assert message in error


def test_unknown_keys_name_file_line_and_the_nearest(write, capsys) -> None:
    file = write("lr: 1\nlog_nit: 3\n")
    assert f"{file}:2: unknown key 'log_nit'. Did you mean 'log_int'?" in fails(capsys, parser(LR, LOG), "-c", file)
    assert "unknown key 'optim.lr'" in fails(capsys, parser(LOG), "-c", write("optim: {lr: 1}"))
    for own in ("help: x", "config: x", "print_config: 1"):
        assert "unknown key" in fails(capsys, parser(LOG), "-c", write(own))


def test_broken_and_missing_files(write, capsys) -> None:
    assert "'nix.yaml' does not exist" in fails(capsys, parser(LOG), "-c", "nix.yaml")
    assert "a.yaml:1: not valid YAML" in fails(capsys, parser(LOG), "-c", write("a: ["))
    assert "stands twice" in fails(capsys, parser(LOG), "-c", write("log_int: 1\nlog_int: 2\n"))
    assert "set twice" in fails(capsys, parser(LOG), "-c", write("log_int: 1\nlog-int: 2\n"))
    assert "expected one argument" in fails(capsys, parser(LOG), "-c")


def test_dests_with_dots_and_dashes(write) -> None:
    made = parser(("--optim.lr", {"type": float}), ("--log-int", {"dest": "log-int"}), ("--optim.wd", {}))
    args = made.parse_args(["-c", write("optim: {lr: 1e-3}\noptim.wd: 0\nlog_int: 4\n")])
    assert vars(args) == {"optim.lr": 0.001, "log-int": "4", "optim.wd": "0"}


# What is required


def test_required_arguments_may_come_from_a_file(write, capsys) -> None:
    made = parser(LR, ("data", {}), ("more", {"nargs": "*", "default": "d"}))
    file = write("lr: 1\ndata: d1\nmore: [m]\n")
    assert vars(made.parse_args(["-c", file])) == {"lr": 1.0, "data": "d1", "more": ["m"]}
    assert vars(made.parse_args(["-c", file, "d2"])) == {"lr": 1.0, "data": "d2", "more": ["m"]}
    assert vars(made.parse_args(["-c", file, "d2", "x", "y"]))["more"] == ["x", "y"]
    error = fails(capsys, made, "-c", write("more: [m]"))
    assert "the following arguments are required: --lr, data" in error
    assert "--lr LR" in error
    assert "[--lr LR]" not in error
    assert "required: --lr" in fails(capsys, made, "-c", write("lr: null"), "d")
    # Nothing sticks: the parser is as it was.
    assert "required: --lr, data" in fails(capsys, made)


def test_exclusive_groups(write, capsys) -> None:
    made = parser(LOG)
    group = made.add_mutually_exclusive_group(required=True)
    group.add_argument("--a")
    group.add_argument("--b")
    assert made.parse_args(["-c", write("a: 1")]).a == "1"
    args = made.parse_args(["-c", write("a: 1"), "--b", "2"])
    assert (args.a, args.b) == (None, "2")
    args = made.parse_args(["-c", write("a: 1", "1.yaml"), "-c", write("b: 2", "2.yaml")])
    assert (args.a, args.b) == (None, "2")
    assert "one of the arguments --a --b is required" in fails(capsys, made)
    assert "exclude each other" in fails(capsys, made, "-c", write("a: 1\nb: 2"))
    assert "not allowed with" in fails(capsys, made, "--a", "1", "--b", "2")


# --print-config


def test_print_config_loads_again(write, capsys, tmp_path) -> None:
    def made() -> ArgumentParser:
        built = parser(
            LR, NAME, ("--j", {"type": json.loads}), ("--p", {"type": float, "default": float("inf")}), ("data", {}),
            ("--opt.x", {"nargs": "+"}), ("-v", {"action": "count", "default": 0}), ("--on", {"action": "store_true"}),
        )  # fmt: skip
        group = built.add_mutually_exclusive_group()
        group.add_argument("--a")
        group.add_argument("--b")
        built.set_defaults(extra=1, func=print)
        return built

    words = ["-c", write("name: 0123\nopt.x: ['null', 1e-3]\na: 'on'\n"), "--lr", "1e-5", "--j", '{"k": 1}', "d", "-vv"]
    wanted = made().parse_args(words)
    assert wanted.p == float("inf")
    with pytest.raises(SystemExit) as caught:
        made().parse_args([*words, "--print-config"])
    assert caught.value.code == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert made().parse_args(["-c", str(again)]) == wanted


def test_print_config_without_what_is_required(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        parser(LR, LOG, ("data", {})).parse_args(["--print-config"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "lr: null\nlog_int: 10\ndata: null\n"


# What launchers add


@pytest.mark.parametrize(
    "words",
    [
        ["--local_rank", "1"],
        ["--local-rank=1"],
        ["--local_rank=0", "--deepspeed", "--deepspeed_config", "ds.json"],
        ["--deepspeed"],
    ],
)
def test_options_that_launchers_add_are_dropped(words: list[str]) -> None:
    assert vars(parser(LOG).parse_args([*words, "--log-int", "3"])) == {"log_int": 3}
    assert parser(LOG).parse_known_args([*words, "--nix"]) == (argparse.Namespace(log_int=10), ["--nix"])


@pytest.mark.parametrize("declared", ["--local_rank", "--local-rank"])
@pytest.mark.parametrize("given", ["--local_rank", "--local-rank"])
def test_a_declared_local_rank_takes_both_spellings(declared: str, given: str) -> None:
    assert parser((declared, {"type": int})).parse_args([f"{given}=3"]).local_rank == 3


def test_declared_deepspeed_options_are_the_scripts() -> None:
    made = parser(("--deepspeed", {"action": "store_true"}), ("--deepspeed_config", {}))
    args = made.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert vars(args) == {"deepspeed": True, "deepspeed_config": "ds.json"}


def test_hidden_options_do_not_spoil_abbreviations(capsys) -> None:
    made = parser(("--local-steps", {}), ("--deep", {}), ("--configuration", {}), ("--printer", {}))
    args = made.parse_args(["--loc", "1", "--dee", "2", "--conf", "3", "--print", "4"])
    assert vars(args) == {"local_steps": "1", "deep": "2", "configuration": "3", "printer": "4"}
    made.print_help()
    text = capsys.readouterr().out
    assert "--print-config" in text
    assert "local_rank" not in text
    assert "deepspeed" not in text


# The rest of argparse's interface


def test_the_scripts_own_c_is_kept(write) -> None:
    made = parser(("-c --channels", {"type": int}))
    args = made.parse_args(["-c", "3", "--config", write("channels: 4")])
    assert vars(args) == {"channels": 3}
    made = parser(("--config", {}))
    assert made.parse_args(["--config", "x", "-c", write("config: y")]).config == "x"


def test_help_shows_what_is_required_and_where_files_go(capsys) -> None:
    with pytest.raises(SystemExit):
        parser(LR).parse_args(["--help"])
    text = capsys.readouterr().out
    assert "--config FILE" in text
    assert "[--lr LR]" not in text
    assert parser(LR).format_usage().startswith("usage: train [-h] --lr LR")


def test_known_and_intermixed_arguments(write) -> None:
    made = parser(LR, ("data", {}), ("files", {"nargs": "*"}))
    file = write("lr: 1")
    args, rest = made.parse_known_args(["-c", file, "d", "--nix", "1"])
    assert (args.lr, args.data) == (1.0, "d")
    assert rest == ["--nix", "1"] or args.files == ["1"]
    args = made.parse_intermixed_args(["d", "-c", file, "x", "--lr", "2", "y"])
    assert vars(args) == {"lr": 2.0, "data": "d", "files": ["x", "y"]}
    args = made.parse_intermixed_args(["d", "-c", write("lr: 3\nfiles: [z]")])
    assert vars(args) == {"lr": 3.0, "data": "d", "files": ["z"]}


def test_parents_groups_defaults_and_namespaces(write) -> None:
    parent = parser(LR, add_help=False)
    parent.parse_known_args(["--lr", "1"])  # gives the parent its own -c
    child = parser(NAME, parents=[parent])
    group = child.add_argument_group("optimizer")
    group.add_argument("--wd", type=float, default=0.0)
    child.set_defaults(name="n", extra=1)
    args = child.parse_args(["-c", write("lr: 1e-3\nwd: 2\nextra: 0123\n")], argparse.Namespace(kept=1))
    assert vars(args) == {"lr": 0.001, "wd": 2.0, "name": "n", "extra": "0123", "kept": 1}


def test_subcommands_take_their_own_files(write, capsys) -> None:
    made = parser(NAME)
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("fit").add_argument("--lr", type=float, required=True)
    args = made.parse_args(["-c", write("name: n", "1.yaml"), "fit", "-c", write("lr: 1e-3", "2.yaml")])
    assert vars(args) == {"name": "n", "command": "fit", "lr": 0.001}
    assert "required: command" in fails(capsys, made)
    assert "required: --lr" in fails(capsys, made, "fit")


def test_a_parser_that_raises_instead_of_exiting(write) -> None:
    made = parser(LOG, exit_on_error=False)
    with pytest.raises(argparse.ArgumentError, match="unknown key 'nix'"):
        made.parse_args(["-c", write("nix: 1")])


def test_words_after_a_double_dash_are_the_scripts(write) -> None:
    made = parser(LOG, ("rest", {"nargs": "*"}))
    assert made.parse_args(["--", "-c", "x"]).rest == ["-c", "x"]


def test_it_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, phalanx; phalanx.ArgumentParser(); print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
