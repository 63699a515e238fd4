"""Commands that run ranks in an image, with a stand-in for the runtime that shows what it was given."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.config import load_config
from phalanx.containers import images, probe
from phalanx.containers.wrap import packages, parts
from phalanx.errors import ConfigError, PlanError
from phalanx.planning.facts import Facts
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program
from phalanx.secret import is_secret
from phalanx.shell import render

RUNTIME = r"""#!/bin/bash
n=$(ls "$SEEN" | wc -l)
printf '%s\0' "$@" >"$SEEN/$n.argv"; env -0 >"$SEEN/$n.env"
"""
SRUN = r"""#!/bin/bash
while [[ $1 = -* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node SLURM_STEP_ID=0 "$@" || exit; done
"""


def plan(cwd, *overrides, slurm=False, script="train.py", args=(), **environ):
    config = load_config((), [f"container.image={cwd}/i.sif", *overrides], environ).config
    facts = Facts("here", 8, 0, "/host/python", "Linux", "x86_64", cwd=str(cwd))
    return make_plan(config, facts, Program(script, args), for_slurm=slurm)


@pytest.fixture
def run(tmp_path):
    """Carries a plan's command out; what each start of the runtime was given, as (words, variables)."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "seen").mkdir()
    for name, text in (("apptainer", RUNTIME), ("singularity", RUNTIME), ("srun", SRUN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(made, **more):
        environ = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            **{"SEEN": str(tmp_path / "seen"), "PHALANX_RUN_DIR": str(tmp_path / "a,b:c"), **more},
            **{name: str(value) for name, value in made.environment.items() if name != "PHALANX_RUN_DIR"},
        }
        done = subprocess.run(["bash", "-c", render(made.command)], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        files = sorted((tmp_path / "seen").glob("*.argv"), key=lambda path: int(path.stem))
        return [(_split(path), dict(pair.split("=", 1) for pair in _split(path.with_suffix(".env")))) for path in files]

    return start


def _split(path):
    return path.read_text().split("\0")[:-1]


def test_a_rank_is_executed_in_the_image_with_the_projects_folders_bound(tmp_path, run):
    ((words, _),) = run(plan(tmp_path, r"container.binds=/data\:x:/data:ro", args=("--x", "a b", "$y")))
    assert words[0] == "exec"
    image = words.index(f"{tmp_path}/i.sif")
    assert "--no-eval" in words[:image]
    mounts = [next(csv.reader([word[8:]])) for word in words[:image] if word.startswith("--mount=")]
    folders = (str(tmp_path), f"{tmp_path}/a,b:c")
    assert mounts == [
        *(["type=bind", f"source={folder}", f"destination={folder}"] for folder in folders),
        ["type=bind", "source=/data:x", "destination=/data", "ro"],
        ["type=bind", f"source={Path(phalanx.__file__).parent}", "destination=/.phalanx/lib/phalanx", "ro"],
    ]
    assert words[image + 1 : image + 3] == ["sh", "-c"]
    assert words[image + 4 :] == ["sh", "python3", "-m", "phalanx.worker", "train.py", "--x", "a b", "$y"]


def test_ranks_variables_are_given_explicitly_and_per_task_as_written(tmp_path, run):
    odd = "x y, $HOME `id` \"q\" 'a'"
    made = plan(tmp_path, "nodes=2", "launcher=srun", "container.clean_env=true", f"env.A={odd}", slurm=True)
    seen = run(made, MASTER_ADDR="node1", WANDB_API_KEY="hush", OTHER="o")
    assert len(seen) == 2
    for rank, (words, variables) in enumerate(seen):
        assert "--cleanenv" in words
        assert variables["APPTAINERENV_SLURM_PROCID"] == str(rank)
        assert variables["APPTAINERENV_A"] == odd
        assert variables["APPTAINERENV_MASTER_ADDR"] == "node1"
        assert variables["APPTAINERENV_PYTHONUNBUFFERED"] == "1"
        assert variables["APPTAINERENV_WANDB_API_KEY"] == "hush"
        assert "APPTAINERENV_OTHER" not in variables
        assert "APPTAINERENV_PATH" not in variables
        assert not [word for word in words if "hush" in word]  # never among a process's arguments


def test_agents_run_inside_and_learn_their_node_outside(tmp_path, run):
    seen = run(plan(tmp_path, "nodes=2", "nproc=2", slurm=True), PHALANX_RDZV_HOST="h", PHALANX_RDZV_PORT="20000")
    assert [words[words.index("--rdzv-conf") + 1] for words, _ in seen] == ["is_host=1,rank=0", "is_host=0,rank=1"]
    for words, _ in seen:
        assert words.index(f"{tmp_path}/i.sif") < words.index("torch.distributed.run")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["container.gpu=nv"], "--nv"),
        (["container.gpu=rocm"], "--rocm"),
        (["container.home=none"], "--no-home"),
        (["container.home=/tmp/h"], "--home=/tmp/h"),
        (["container.args=--writable-tmpfs,--contain"], "--contain"),
    ],
)
def test_options_of_the_runtime(tmp_path, run, overrides, expected):
    ((words, _),) = run(plan(tmp_path, *overrides))
    assert expected in words[: words.index(f"{tmp_path}/i.sif")]


def words_inside(tmp_path, run, *overrides):
    """What the runtime was told to start in the image, up to the rank's own words."""
    ((words, _),) = run(plan(tmp_path, *overrides))
    inside = words[words.index(f"{tmp_path}/i.sif") + 1 :]
    end = inside.index("python3")
    assert inside[end:] == ["python3", "-m", "phalanx.worker", "train.py"]
    return inside[:end]


def carried_out(words, folder, path=None):
    """Those words, here, with a command that shows what a rank would get."""
    shown = ["sh", "-c", 'echo "A=$A PYTHONPATH=$PYTHONPATH"']
    environ = {"PATH": path or os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": "/images/own"}
    words = [shutil.which(words[0]), *words[1:]]
    return subprocess.run([*words, *shown], env=environ, cwd=folder, capture_output=True, text=True)


def test_this_package_comes_before_the_images_own_path(tmp_path, run):
    done = carried_out(words_inside(tmp_path, run), tmp_path)
    assert done.stdout == "A= PYTHONPATH=/.phalanx/lib:/images/own\n"


def test_a_script_that_is_sourced_before_gets_no_word_of_the_ranks(tmp_path, run):
    """Bash gives a script that is sourced without arguments the words of the one that sources it."""
    (tmp_path / "activate").write_text('export A="$#:$*"\n')
    (tmp_path / "dash").mkdir()
    (tmp_path / "dash/sh").symlink_to(shutil.which("sh"))
    start = words_inside(tmp_path, run, "container.pre=. ./activate")
    for path in (os.environ["PATH"], str(tmp_path / "dash")):
        odd = ["a b", "", "it's $HOME", "*", "x\n"]
        shown = [sys.executable, "-c", "import os, sys; print([os.environ['A'], *sys.argv[1:]])", *odd]
        words = [shutil.which(start[0]), *start[1:], *shown]
        done = subprocess.run(words, env={"PATH": path}, cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == f"{['0:', *odd]}\n", done.stderr


def test_a_rank_begins_in_the_folder_of_its_task(tmp_path, run):
    """With --contain, containers start in their home. Its own variable would be taken for a setting."""
    ((words, variables),) = run(plan(tmp_path))
    assert variables["APPTAINERENV_PHALANX_CWD"] == os.getcwd()
    inside = words[words.index(f"{tmp_path}/i.sif") + 1 :]
    start = [shutil.which("sh"), *inside[1 : inside.index("python3")]]
    for there, expected in ((tmp_path, tmp_path), (tmp_path / "nix", Path("/"))):
        environ = {"PATH": os.environ["PATH"], "PHALANX_CWD": str(there)}
        shown = ["sh", "-c", 'echo "$(pwd) ${PHALANX_CWD-}"']
        done = subprocess.run([*start, *shown], env=environ, cwd="/", capture_output=True, text=True)
        assert done.stdout == f"{expected} \n"
    for own in ("--pwd=/opt", "--cwd=/opt"):  # the user's own folder is where the runtime begins
        words, variables = run(plan(tmp_path, f"container.args={own}"))[-1]
        assert "/opt" in " ".join(words)
        assert "APPTAINERENV_PHALANX_CWD" not in variables


def test_paths_of_the_host_may_begin_with_the_home(tmp_path, run, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("data", "h"):
        (tmp_path / folder).mkdir()
    (tmp_path / "j.sif").touch()
    settings = ("container.image=~/j.sif", "container.binds=~/data,data:/d:ro", "container.home=~/h")
    made = plan(tmp_path, *settings)
    probe.check(made)
    ((words, _),) = run(made)
    assert f"{tmp_path}/j.sif" in words
    assert f"--home={tmp_path}/h" in words
    mounts = [next(csv.reader([word[8:]])) for word in words if word.startswith("--mount=")]
    assert ["type=bind", f"source={tmp_path}/data", f"destination={tmp_path}/data"] in mounts
    assert ["type=bind", f"source={tmp_path}/data", "destination=/d", "ro"] in mounts
    assert packages(made) == tmp_path / "j.sif.phalanx"
    assert packages(plan(tmp_path, "container.image=/")) == Path("/.phalanx")


@pytest.mark.parametrize(
    "lines",
    [
        "source ./activate",
        "export A=1\n",
        "[[ x == x ]] && A=1; export A",
        "false || true\nexport A=1",
        "export A=1 \\",
    ],
)
def test_lines_before_are_bashs(tmp_path, run, lines):
    (tmp_path / "activate").write_text("export A=1\n")
    done = carried_out(words_inside(tmp_path, run, f"container.pre={lines}"), tmp_path)
    assert (done.returncode, done.stdout) == (0, "A=1 PYTHONPATH=/.phalanx/lib:/images/own\n")


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("source nix/bin/activate", 1),
        ("export A=1\nnix-command\nexport B=2", 127),
        ("exit 7", 7),
        ("exit 0", 1),  # nothing would have run, and the launch would have ended well
        ("if true; then", 2),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_lines_before_that_fail_end_the_rank(tmp_path, run, lines, code, shell):
    """An image without bash has them done by its sh, where `source` itself is an error."""
    (tmp_path / "alone").mkdir()
    for name in ("sh", "uname") if shell == "sh" else ("sh", "bash", "uname"):
        (tmp_path / "alone" / name).symlink_to(shutil.which(name))
    done = carried_out(words_inside(tmp_path, run, f"container.pre={lines}"), tmp_path, str(tmp_path / "alone"))
    assert "A=" not in done.stdout
    assert done.returncode != 0
    assert done.returncode == code or (shell, lines) == ("sh", "source nix/bin/activate")
    if lines != "if true; then":  # the shell itself says that it can't read them
        assert f"container.pre ended with exit code {0 if lines == 'exit 0' else done.returncode} on" in done.stderr


@pytest.mark.parametrize("name", ["PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "BASH_ENV"])
def test_the_hosts_python_is_not_the_images(tmp_path, run, name):
    ((_, variables),) = run(plan(tmp_path), **{name: "/host"})
    assert not {name, f"APPTAINERENV_{name}"} & set(variables)
    assert variables["APPTAINERENV_PYTHONNOUSERSITE"] == "1"


def test_the_job_files_own_words_on_python_reach_the_image(tmp_path, run):
    own = {"PYTHONPATH": "/inside", "PYTHONHOME": "/py", "VIRTUAL_ENV": "/v", "PYTHONNOUSERSITE": ""}
    ((_, variables),) = run(plan(tmp_path, *(f"env.{name}={text}" for name, text in own.items())))
    assert {name: variables[f"APPTAINERENV_{name}"] for name in own} == own


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [((), "i.sif.phalanx"), (("container.packages=more, x",), "more, x"), (("container.packages=~/y",), "y")],
)
def test_what_was_put_beside_an_image_is_bound_if_it_is_there(tmp_path, run, overrides, expected, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    made = plan(tmp_path, *overrides)
    ((words, _),) = run(made)
    assert not [word for word in words if "/.phalanx/packages" in word]
    (tmp_path / expected).mkdir()
    words, _ = run(made)[-1]
    (mount,) = [word for word in words if "/.phalanx/packages" in word]
    fields = next(csv.reader([mount.removeprefix("--mount=")]))
    assert fields == ["type=bind", f"source={tmp_path / expected}", "destination=/.phalanx/packages", "ro"]


@pytest.mark.parametrize(
    ("overrides", "environ", "runtime"),
    [
        ([], {}, "apptainer"),
        (["runtime=venv"], {}, "venv"),
        (["runtime=singularity"], {}, "singularity"),
        (["container.runtime=none"], {}, "venv"),
        (["container.cleanenv=true"], {}, "apptainer"),
        ([], {"USE_CONTAINER": "0"}, "venv"),
        ([], {"USE_CONTAINER": "1"}, "apptainer"),
        (["runtime=apptainer"], {"USE_CONTAINER": "0"}, "apptainer"),
    ],
)
def test_one_switch_says_where_ranks_run(tmp_path, overrides, environ, runtime):
    made = plan(tmp_path, *overrides, **environ)
    assert made.runtime == runtime
    assert (made.python == "python3") == (runtime != "venv")


def test_a_container_without_an_image_is_refused():
    config = load_config((), ["runtime=apptainer"], {}).config
    with pytest.raises(PlanError, match=r"container\.image"):
        make_plan(config, Facts("h", 8, 0, "/p", "Linux", "x86_64"), Program("t.py"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["container.image=nix.sif"], ["'nix.sif'", "phalanx container pull"]),
        (["container.image=docker://a/b"], ["docker://a/b", "once", "phalanx container pull docker://a/b"]),
        (["container.binds=/nix:/x"], ["/nix", "container.binds"]),
    ],
)
def test_what_is_not_there_is_said_before(tmp_path, overrides, words):
    (tmp_path / "i.sif").touch()
    probe.check(plan(tmp_path))
    with pytest.raises(PlanError) as caught:
        probe.check(plan(tmp_path, *overrides))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("/a", ("/a", "/a", "")),
        ("/a:/b", ("/a", "/b", "")),
        ("/a:/b:ro", ("/a", "/b", "ro")),
        (r"/a\,b\:c:/b", ("/a,b:c", "/b", "")),
        ("/a,b", ("/a,b", "/a,b", "")),
    ],
)
def test_binds_are_read_as_the_runtimes_write_them(bind, expected):
    assert parts(bind) == expected


@pytest.mark.parametrize(
    ("uri", "name"),
    [("docker://nvcr.io/nvidia/pytorch:25.09-py3", "pytorch_25.09-py3.sif"), ("oras://h/a", "a.sif")],
)
def test_a_pulled_image_is_named_after_its_address(uri, name):
    assert images.file_name(uri) == name


def test_a_cache_in_the_home_is_warned_of(tmp_path, capsys):
    config = load_config((), (), {}).config.container
    images.warn_of_home(config, "apptainer", {"HOME": str(tmp_path)})
    assert f"{tmp_path}/.apptainer/cache" in capsys.readouterr().err
    images.warn_of_home(config.model_copy(update={"cache": "/scratch/c"}), "apptainer", {"HOME": str(tmp_path)})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "MY_APIKEY", "TOKEN"]
)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "SECRETARY", "NCCL_DEBUG", "SORT_KEYS"]
)
def test_names_of_no_secrets(name):
    assert not is_secret(name)


def test_secrets_stand_in_no_plan_and_no_script(tmp_path):
    from phalanx.batch.script import render_script
    from phalanx.config.saved import run_config_text

    loaded = load_config((), ["env.WANDB_API_KEY=hush", "env.A=1"], {})
    made = make_plan(loaded.config, Facts("h", 8, 0, "/p", "Linux", "x86_64"), Program("t.py"), for_slurm=True)
    for text in (made.to_json(), run_config_text(loaded), render_script(made, run_config_text(loaded))):
        assert "hush" not in text
    assert made.environment["WANDB_API_KEY"] == "hush"  # it reaches the ranks


def test_unknown_words_of_the_section_are_errors():
    with pytest.raises(ConfigError, match=r"container\.imag"):
        load_config((), ["container.imag=x"], {})
    with pytest.raises(ConfigError, match="no option"):
        load_config((), ["container.args=x"], {})


@pytest.fixture
def image_says(tmp_path, monkeypatch):
    """A runtime whose image answers the probe with a line, or fails; what ranks would run is `script`."""
    (tmp_path / "bin").mkdir()

    def answer(line, *overrides, code=0, script="import torch", slurm=False):
        (tmp_path / "train.py").write_text(script + "\n")
        path = tmp_path / "bin" / "apptainer"
        path.write_text(f"#!/bin/sh\necho '{line}'\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        probe._known.clear()
        return probe.look(plan(tmp_path, *overrides, slurm=slurm))

    return answer


def said(**changed):
    """A probe's answer of a stock image: torch, and nothing that the API needs beside it."""
    found = {"python": "3.12.1", "torch": "2.9", "worker": None, "api": "ModuleNotFoundError: No module named pydantic"}
    found |= dict.fromkeys(("horovod", "deepspeed", "ray"))
    return "PROBE" + json.dumps(found | changed)


API = "import phalanx\ndef main():\n    run = phalanx.init()"


def test_a_fit_image_is_told_with_its_versions(image_says):
    assert image_says(said()) == ["image: torch 2.9, Python 3.12.1"]
    assert image_says(said(api=None), script=API) == ["image: torch 2.9, Python 3.12.1"]


@pytest.mark.parametrize(
    "script",
    [
        "import json",
        "try:\n    import torch\nexcept ImportError:\n    torch = None",
        "import sys\nif sys.argv[1:]:\n    import torch",
        "from phalanx import EpochTimer, Topology",
        "def unused():\n    import phalanx",
        "import sys, phalanx\nif sys.argv[1:]:\n    run = phalanx.init()",
    ],
)
def test_what_a_script_may_do_without_is_not_asked_for(image_says, script):
    assert image_says(said(torch=None), script=script) == ["image: torch none, Python 3.12.1"]


def test_an_image_for_a_command_needs_no_torch(image_says, tmp_path):
    image_says(said())
    assert probe.look(plan(tmp_path, script=None, args=("bash", "run.sh"))) == ["image: torch 2.9, Python 3.12.1"]


@pytest.mark.parametrize(
    ("answer", "options", "words"),
    [
        (said(torch=None), {}, ["holds no torch for python3 (Python 3.12.1)", "train.py", "definition"]),
        (said(torch=None), {"script": "from own import x"}, ["holds no torch", "train.py"]),
        (said(torch=None), {"script": "", "overrides": ["nproc=2"]}, ["holds no torch", "launcher torchrun"]),
        (said(), {"script": "", "overrides": ["strategy=horovod"]}, ["holds no horovod", "strategy horovod"]),
        (said(), {"script": "", "overrides": ["strategy=deepspeed", "nproc=2"]}, ["holds no deepspeed", "deepspeed"]),
        (said(), {"script": "", "overrides": ["launcher=ray", "nproc=2"]}, ["holds no ray", "launcher ray"]),
        (
            said(),
            {"script": "import phalanx\nif __name__ == '__main__':\n    phalanx.init()"},
            ["train.py uses the API"],
        ),
        (said(), {"script": API}, ["train.py uses the API", "pydantic", "`phalanx container prepare "]),
        (said(), {"script": "from phalanx.config import load_config"}, ["`phalanx container prepare "]),
        (said(python="3.9.1"), {"script": API}, ["Python 3.9.1", "3.10 or newer"]),
        (said(python="3.9.1"), {"script": "from phalanx import EpochTimer"}, ["Python 3.9.1", "3.10 or newer"]),
        (said(python="3.7.1"), {}, ["Python 3.7.1", "3.8 or newer", "set python"]),
        (said(worker="ImportError: x"), {}, ["ranks fail at ImportError: x"]),
        ("FATAL: could not open image", {"code": 255}, ["python3 does not run", "255", "could not open image"]),
        ("exec: python3: not found", {"code": 127}, ["python3: not found", "set python to the image's interpreter"]),
        (
            "WARNING: bind\nno env/activate\npre ended",
            {"code": 1, "overrides": ["container.pre=. env/activate"]},
            ["(exit code 1): no env/activate", "pre ended"],
        ),
        ("no bash", {"code": 127, "overrides": ["env.PATH=/nix"]}, ["does not run in it (exit code 127)"]),
    ],
)
def test_an_image_that_ranks_could_not_use_is_refused(image_says, tmp_path, answer, options, words):
    (tmp_path / "own.py").write_text("import torch\nx = 1\n")
    with pytest.raises(PlanError) as caught:
        image_says(answer, *options.pop("overrides", ()), **options)
    for word in words:
        assert word in str(caught.value)


def test_a_torch_that_is_older_than_the_apis_is_told(image_says):
    assert "torch 2.4.1" in image_says(said(api=None, torch="2.4.1"), script=API)[1]
    assert len(image_says(said(torch="2.0.1"), script="import torch", code=0)) == 1


def test_the_api_without_its_packages_names_the_command():
    """Where a script imports it at a place that nobody could foresee."""
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "import phalanx; from phalanx import bound\n"
        "bound.LIBRARY = phalanx.__file__[:9]\n"
        "phalanx.ArgumentParser"
    )
    environ = {**os.environ, "APPTAINER_CONTAINER": "/images/torch.sif"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert "MissingExtraError: the API needs yaml" in done.stderr
    assert "`phalanx container prepare /images/torch.sif`" in done.stderr


def test_packages_that_do_not_fit_the_image_are_named(image_says, tmp_path):
    (tmp_path / "i.sif.phalanx").mkdir()
    with pytest.raises(PlanError, match=r"i\.sif\.phalanx doesn't fit .*: remove that folder"):
        image_says(said(), script=API)


@pytest.mark.parametrize("lines", ["before=export APPTAINER_BIND=/x", "modules.load=singularity-bindings"])
def test_what_a_jobs_own_lines_may_bring_is_told_and_not_refused(image_says, lines):
    with pytest.raises(PlanError, match="holds no torch"):  # nothing runs those lines here
        image_says(said(torch=None), lines)
    (note,) = image_says(said(torch=None), lines, slurm=True)
    assert "holds no torch" in note


def test_the_look_sees_what_the_settings_give_the_ranks(tmp_path, monkeypatch):
    """A rank's variables arrive in the probe, also those that a shell evaluates; secrets in no argument."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "apptainer"
    program.write_text("#!/bin/bash\nenv >\"$SEEN\"; tr '\\0' ' ' </proc/$PPID/cmdline >>\"$SEEN\"; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PYTHONPATH", "/host")
    words = ("env.PYTHONPATH=/own", "env.MY_A=!sh $SEEN/x", "env.HF_TOKEN=hush", "tmpdir=!sh /local/$NONE")
    with pytest.raises(PlanError, match="does not run"):
        probe.look(plan(tmp_path, *words))
    seen = (tmp_path / "seen").read_text()
    assert "\nAPPTAINERENV_PYTHONPATH=/own\n" in seen
    assert f"\nAPPTAINERENV_MY_A={tmp_path}/seen/x\n" in seen
    assert seen.count("hush") == seen.count("HF_TOKEN=hush")
    assert "/host" not in seen.replace("/host/python", "")


def test_where_there_is_no_runtime_the_image_is_not_looked_into(tmp_path, monkeypatch):
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    assert probe.look(plan(tmp_path)) == ["apptainer is not on PATH here, so the image was not looked into"]
