import subprocess

import pytest

from phalanx.shell import Sh, render, script

ODD = [
    "",
    "a b",
    "$HOME",
    "`id`",
    "it's",
    'say "x"',
    "a\nb",
    "*",
    "~",
    "!x",
    "#1",
    "a=b c",
    "--",
    "ü",
    "\\",
    "$$",
    "a;b&c|d",
]


def echoed(line: str, **environment: str) -> list[str]:
    """The words that a real shell makes of `line`."""
    command = f"printf '%s\\0' {line}"
    return subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]


def test_literal_words_come_back_from_a_shell_as_they_were():
    assert echoed(render(ODD)) == ODD


def test_shell_words_are_evaluated_and_literal_ones_are_not():
    assert echoed(render(["$NODE", Sh('"$NODE"'), Sh("$((NODE + 1))")]), NODE="3") == ["$NODE", "3", "4"]


@pytest.mark.parametrize("word", ODD)
def test_a_line_within_a_line_keeps_its_words(word):
    inner = render(["printf", "%s", word])
    assert subprocess.run(["sh", "-c", render(["sh", "-c", inner])], capture_output=True, text=True).stdout == word


def test_a_script_has_its_environment_and_folder_and_the_exit_code_of_its_command(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    text = script(["sh", "-c", 'printf %s "$A|$PWD"; exit 7'], {"A": "x 'y' $z"}, str(folder))
    ended = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == (f"x 'y' $z|{folder}", 7)
