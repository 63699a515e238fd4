"""Texts of job files: what may stand in scripts and paths, and what must not be written down at all."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.config import load_config, load_run_config
from phalanx.config.saved import run_config_text
from phalanx.errors import ConfigError
from phalanx.shell import Sh, evaluate, exports, required

PREVIEW = ("submit", "--preview", "device=cpu")


def refused(capsys, *words):
    assert main([*PREVIEW, *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("name", ["B;touch PWNED", "A-B", "1A", "A B", "A$(id)", "Ü", ""])
def test_what_is_no_name_of_a_variable_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps({"env": {name: "2"}}))
    assert "job.yaml" in refused(capsys, "-c", "job.yaml", "t.py")


def test_variables_that_bash_keeps_to_itself_are_refused(capsys):
    said = subprocess.run(["bash", "-c", "export UID=5"], capture_output=True, text=True).stderr
    assert "readonly" in said
    assert "UID" in refused(capsys, "env.UID=5", "t.py")


@pytest.mark.parametrize(
    "words",
    [
        ["name=.."],
        ["name=."],
        ["name=a/b"],
        ["name=a\nb"],
        ["name=/tmp/x"],
        ["job_name=.."],
        ["job_name=a\nb"],
        ["comment=a\nb"],
        ["output=a\nb"],
        ["shebang=/bin/bash\ntouch X"],
        ["shebang=touch X # bash"],
        ["interface=a\nb"],
        ["venv=a\nb"],
        ["modules.load=a\nb"],
        ["srun_args=--x=a\nb"],
        ["mail_user=a\x00b"],
    ],
)
def test_lines_and_names_that_could_not_stand_are_refused(words, capsys):
    setting = words[0].partition("=")[0]
    assert setting.removeprefix("job_") in refused(capsys, *words, "t.py")


def test_words_of_sbatch_args_stay_one_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for word in ("--comment=a\n touch X", "--comment=a\rb"):
        (tmp_path / "job.yaml").write_text(json.dumps({"sbatch_args": [word]}))
        assert "sbatch_args" in refused(capsys, "-c", "job.yaml", "t.py")
    (tmp_path / "job.yaml").write_text(json.dumps({"sbatch_args": ["--a=b c", "--d='e f'", "--g=it's"]}))
    assert main([*PREVIEW, "-c", "job.yaml", "t.py"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#SBATCH --")]
    words = [subprocess.run(["bash", "-c", f"printf %s {line[8:]}"], capture_output=True, text=True) for line in lines]
    assert [done.stdout for done in words if done.stdout[2:4] in ("a=", "d=", "g=")] == [
        "--a=b c",
        "--d=e f",
        "--g=it's",
    ]


@pytest.mark.parametrize("text", ["", " ", "\t"])
@pytest.mark.parametrize(
    "key", ["mail_user", "account", "output", "name", "run_root", "venv", "conda", "python", "container.image", "mpi"]
)
def test_an_empty_text_is_said_to_be_empty(key, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, _, second = key.partition(".")
    (tmp_path / "job.yaml").write_text(json.dumps({first: {second: text} if second else text}))
    said = refused(capsys, "-c", "job.yaml", "t.py")
    assert key in said
    assert "\t" in text or ("empty" in said and "null" in said)
    (tmp_path / "job.yaml").write_text(json.dumps({first: {second: None} if second else None}))
    assert main([*PREVIEW, "-c", "job.yaml", "t.py"]) == (0 if key != "run_root" else 2)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("~/data", "/h/data"),
        ("~", "/h"),
        ("~root/x", "/root/x"),
        ("/a:~/b", "/a:/h/b"),
        ("$X/~y", "x/~y"),
        ("a~", "a~"),
        ("$X y", "x y"),
    ],
)
def test_a_tilde_of_shell_text_is_a_home(text, meant, monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("X", "x")
    line = exports({"A": Sh(text)})[0]
    done = subprocess.run(["bash", "-c", f'{line}; printf %s "$A"'], capture_output=True, text=True, check=True)
    assert (done.stdout, evaluate(Sh(text))) == (meant, meant)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1234e56", "1234e56"),
        ("12e4", "12e4"),
        ("6e00123", "6e00123"),
        ("1_000", "1_000"),
        ("0x1f", "0x1f"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("on", "on"),
        ("no", "no"),
        ("2026-01-02", "2026-01-02"),
        ("'1234'", "1234"),
        ("'1234e56'", "1234e56"),
        ('"1e-3"', "1e-3"),
        ("'true'", "true"),
        ("'a b'", "'a b'"),
        ("1e-4", 1e-4),
        ("3E-4", 3e-4),
        ("10e-3", 10e-3),
        ("1e6", 1e6),
        ("2.5e3", 2.5e3),
        ("1e+16", 1e16),
        (".5", 0.5),
        ("1234567", 1234567),
        ("-3", -3),
        ("true", True),
        ("[12e4, 1e-4, '7']", ["12e4", 1e-4, "7"]),
    ],
)
def test_on_a_command_line_no_identifier_becomes_a_number(text, value, tmp_path):
    for loaded in (load_config((), [f"params.x={text}"], {}), load_config((), (), {"PHALANX_PARAMS__x": text})):
        found = loaded.config.params["x"]
        assert (found, type(found)) == (value, type(value))
        (tmp_path / "config.yaml").write_text(run_config_text(loaded))
        assert load_run_config(tmp_path).config.params["x"] == value


SECRETS = {
    "env": {"HF_TOKEN": "hush-1", "DATABASE_URL": "postgres://u:hush-2@h/d", "PLAIN": "seen"},
    "proxy": {"http": "http://u:hush-3@proxy:1", "no": "localhost"},
    "params": {"api_key": "hush-4", "deep": [{"url": "redis://:hush-5@h"}], "pad_token": "<pad>", "n": 3},
    "launcher": "srun",
    "nproc": 1,
}


def test_no_file_has_a_secret_and_ranks_have_them_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(SECRETS))
    assert main([*PREVIEW, "-c", "job.yaml", "t.py"]) == 0
    script, notes = capsys.readouterr()
    assert "hush" not in script + notes
    for name in ("HF_TOKEN", "DATABASE_URL", "http_proxy", "SECRET_PARAMS_API_KEY", "SECRET_PARAMS_DEEP_0_URL"):
        assert name in notes
    assert "PLAIN=seen" in script
    settings = script.partition("END_OF_CONFIG'\n")[2].partition("\nEND_OF_CONFIG")[0]
    (tmp_path / "config.yaml").write_text(settings)
    monkeypatch.setenv("SECRET_PARAMS_API_KEY", "1234")
    monkeypatch.setenv("SECRET_PARAMS_DEEP_0_URL", "x")
    params = load_run_config(tmp_path).config.params
    assert params == {"api_key": "1234", "deep": [{"url": "x"}], "pad_token": "<pad>", "n": 3}


def test_a_plan_and_its_listing_show_no_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps({**SECRETS, "launcher": "auto"}))
    for more in ([], ["--json"]):
        assert main(["plan", *more, "-c", "job.yaml", "t.py"]) == 0
        assert "hush" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["training_cmd=HF_TOKEN=hush python t.py"],
        ["training_cmd=t.py --db postgres://u:hush@h"],
        ["before=export WANDB_API_KEY=hush", "t.py"],
        ["exec_command=curl http://u:hush@h"],
        ["sbatch.export=ALL,GITHUB_PAT=hush", "t.py"],
        ["srun_args=--export=PGPASSWORD=hush", "t.py"],
        ["container.args=--env=HF_TOKEN=hush", "container.image=x.sif", "t.py"],
        ["comment=ghp_hushhushhushhushhush1", "t.py"],
        ["t.py", "--token", "hf_hushhushhushhushhushhushh"],
        ["env.HF_TOKEN=hush-hush-hush", "before=echo hush-hush-hush", "t.py"],
    ],
)
def test_a_secret_that_would_be_written_down_is_refused_and_not_repeated(words, capsys):
    said = refused(capsys, *words)
    assert "env" in said
    assert "hush" not in said


def test_lines_that_take_a_secret_from_elsewhere_are_none(capsys):
    words = ["before=export HF_TOKEN=$(cat ~/.token)", "proxy.http=!sh http://u:$PASS@h:1", "t.py"]
    assert main([*PREVIEW, *words]) == 0
    assert "http://u:$PASS@h:1" in capsys.readouterr().out


def test_a_script_names_what_it_lacks_and_ends(tmp_path):
    text = "\n".join([*required(["A_TOKEN", "B_KEY"]), "echo on"])
    lacks = subprocess.run(["bash", "-c", text], env={"B_KEY": ""}, capture_output=True, text=True)
    assert (lacks.returncode, lacks.stdout) == (2, "")
    assert "A_TOKEN" in lacks.stderr
    assert "B_KEY" not in lacks.stderr
    has = subprocess.run(["bash", "-c", text], env={"B_KEY": "", "A_TOKEN": "x"}, capture_output=True, text=True)
    assert (has.returncode, has.stdout) == (0, "on\n")


def test_settings_that_are_shown_keep_secrets_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps({**SECRETS, "launcher": "auto"}))
    for more in ([], ["--explain"]):
        assert main(["config", *more, "-c", "job.yaml"]) == 0
        assert "hush" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "folder", "file"), [(None, 0o700, 0o600), ("0750", 0o750, 0o640), ("770", 0o770, 0o660)]
)
def test_a_run_directory_is_as_open_as_run_mode_says_whatever_the_umask(mode, folder, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text(
        "import os\nopen(os.environ['PHALANX_RUN_DIR'] + '/own', 'w').close()\nraise SystemExit(3)\n"
    )
    old = os.umask(0o077 if mode else 0o022)
    try:
        assert main(["run", "--local", "device=cpu", "env.A=1", *([f"run_mode={mode}"] if mode else []), "t.py"]) == 3
        assert os.umask(0o077 if mode else 0o022) == (0o077 if mode else 0o022)
    finally:
        os.umask(old)
    (run_dir,) = Path("runs/t").iterdir()
    assert run_dir.stat().st_mode & 0o777 == folder
    found = {path.name: path.stat().st_mode & 0o777 for path in run_dir.rglob("*")}
    assert found.pop("own") == (0o644 if mode is None else file)  # the script's own file is its umask's business
    assert {name: bits for name, bits in found.items() if bits not in (folder, file)} == {}
    assert {"config.yaml", "plan.json", "0.json", "0.log"} <= found.keys()


@pytest.mark.parametrize("mode", ["0600", "rwx", "0800", "4700", "77"])
def test_a_mode_that_shuts_out_its_owner_is_refused(mode):
    with pytest.raises(ConfigError, match="run_mode"):
        load_config((), [f"run_mode={mode}"], {})


OPEN = ["cat <<END\nabc", "echo 'abc", 'x="$(date', "if true; then", "for a in b; do", ") ; exit 9; (", "f() {"]


@pytest.mark.parametrize(
    ("name", "text"),
    [*(("before", text) for text in OPEN), *((name, OPEN[0]) for name in ("after", "exec_command", "pre_exec_file"))],
)
def test_shell_text_that_does_not_end_is_refused_before_anything_is_written(name, text, tmp_path, monkeypatch, capsys):
    """Else a here-document swallows the launch: bash takes the rest of the script for its text, and ends with 0."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "lines.sh").write_text(text)
    setting = f"{name}=lines.sh" if name.endswith("file") else f"{name}={text}"
    script = [] if name in ("exec_command", "training_cmd") else ["t.py"]
    assert main(["submit", "--preview", "device=cpu", setting, *script]) == 2
    said = capsys.readouterr()
    assert f"{name} is no complete shell text" in said.err
    assert said.out == ""


def test_shell_text_that_ends_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    for text in ("cat <<END\nabc\nEND", "shopt -s extglob; ls !(x) || true", "export A=1 \\", "f() { a; }  # it's"):
        assert main(["submit", "--preview", "device=cpu", f"before={text}", f"after={text}", "t.py"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("key", ["env.A", "tmpdir", "proxy.http"])
@pytest.mark.parametrize("text", ['"', "$(date", "`date", 'a" ; touch PWNED; "', '"a b" c "d e"'])
def test_shell_text_of_a_value_is_one_word(key, text, capsys):
    assert f"{key}: the shell text" in refused(capsys, f"{key}=!sh {text}", "t.py")


def test_shell_text_of_a_value_may_hold_spaces_and_quotes_within_expansions():
    texts = ["a b", "$HOME/x; y", '$(echo "a  b")', "it's", "x\ny", "${A:-$(echo `echo z`)}", r"a\"b"]
    for text in texts:
        line = exports({"A": Sh(text)})[0]
        assert main([*PREVIEW, f"env.A=!sh {text}", "t.py"]) == 0
        assert subprocess.run(["bash", "-ec", f"{line}; [ $(compgen -e | grep -c '^A$') = 1 ]"]).returncode == 0


@pytest.mark.parametrize("words", [["t.py", "--api-key", "abcdef1"], ["training_cmd=t.py --db-password 'hunter2'"]])
def test_an_option_of_the_script_that_means_a_secret_is_refused_with_its_value(words, capsys):
    assert "put it into env" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("word", "instead"),
    [("--nodes=3", "nodes"), ("--array=0-3", "array"), ("--job-name=x", "job_name"), ("--wrap=ls", "training_cmd")],
)
def test_an_option_that_a_setting_decides_is_none_of_a_sites(word, instead, capsys):
    """Slurm takes the last of two: the job had other nodes than its launch."""
    assert instead in refused(capsys, f"sbatch_args=[{word}]", "t.py")
    assert main([*PREVIEW, "sbatch_args=--comment=x", "t.py"]) == 0


@pytest.mark.parametrize("text", ["nohup python t.py >log 2>&1 &", "python t.py &  # in the background\n"])
def test_a_launch_that_nobody_waits_for_is_refused(text, capsys):
    """A batch job ends with its script, whatever still runs, and with the script's exit code."""
    for name in ("training_cmd", "exec_command"):
        assert f"{name} ends with &" in refused(capsys, f"{name}={text}")
    assert main([*PREVIEW, "exec_command=srun python t.py & wait $!"]) == 0
    for ending in ("--url 'a?b&c&'", "--name \\&", "# not &", "2>&1 # nor this &\n"):
        assert main([*PREVIEW, f"training_cmd=python t.py {ending}"]) == 0


def test_what_else_bash_complains_of_is_no_fault_of_the_text(monkeypatch, capsys):
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent/lib.so")
    monkeypatch.setenv("BASH_FUNC_broken%%", "() { if")
    complains = subprocess.run(["bash", "-n"], input="a\n", capture_output=True, text=True)
    assert "LD_PRELOAD" in complains.stderr
    assert main([*PREVIEW, "before=export A=1", "t.py"]) == 0
    capsys.readouterr()
    assert "before is no complete shell text" in refused(capsys, "before=echo 'a", "t.py")


def test_a_line_that_a_backslash_ends_does_not_take_the_next_along(tmp_path, monkeypatch, capsys):
    """bash says what runs: no text of the user's, nor what the script does next, is another's word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.sh").write_text("echo two \\\n")
    assert main([*PREVIEW, "before=echo one \\", "pre_exec_file=more.sh", "t.py"]) == 0
    lines = capsys.readouterr().out.partition("# Before\n")[2].partition("set +eu")
    assert lines[1]
    script = f"{lines[0]}{lines[1]}{lines[2].partition(chr(10))[0]}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("one\ntwo\n", "")
