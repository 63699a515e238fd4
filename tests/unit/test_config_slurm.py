"""Settings of Slurm jobs: names, aliases, forms of time, what excludes what, and shell text."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import load_config
from phalanx.config.interpolate import escape
from phalanx.config.saved import chosen, dump, run_config_text
from phalanx.config.text import Plain, is_null
from phalanx.config.walltime import seconds
from phalanx.errors import ConfigError


def config(*overrides, **files):
    return load_config((), overrides, {}).config


def from_yaml(tmp_path, text, *overrides):
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return load_config([file], overrides, {})


def fault(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text, *overrides)
    return str(caught.value)


# From sbatch's manual: acceptable formats of --time.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90 * 60),
        ("30:00", 30 * 60),
        ("12:00:00", 12 * 3600),
        ("00:30:00", 1800),
        ("1-12", 36 * 3600),
        ("1-12:30", 36 * 3600 + 30 * 60),
        ("1-12:30:15", 36 * 3600 + 30 * 60 + 15),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them_and_stay_as_written(tmp_path, text, expected):
    assert seconds(text) == expected
    assert from_yaml(tmp_path, f"time: {text}\n").config.time == text
    assert config(f"slurm.time={text}").time == text


@pytest.mark.parametrize("text", ["12h", "1:2:3:4", "-5", "1-", "", "12:00:00 pm", "1e3", "1.5"])
def test_what_is_no_time_limit_is_refused_with_the_forms(tmp_path, text):
    if text:
        said = fault(tmp_path, f"time: '{text}'\n")
        assert said.startswith(f"time = {text!r} (")
        assert "D-HH" in said
    with pytest.raises(ValueError, match="HH:MM:SS"):
        seconds(text)


def test_any_option_of_sbatch_is_a_setting_by_its_name(tmp_path):
    loaded = from_yaml(
        tmp_path, "qos: high\nexclusive: true\nrequeue: true\nmail-type: END,FAIL\nslurm:\n  time: 30:00\n"
    )
    assert (loaded.config.sbatch.qos, loaded.config.sbatch.exclusive) == ("high", "true")
    assert (loaded.config.sbatch.requeue, loaded.config.sbatch.mail_type) == (True, "END,FAIL")
    assert loaded.config.time == "30:00"
    assert from_yaml(tmp_path, "qos: high\nname: a-${qos}\n").config.name == "a-high"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("qoss", ["'qoss'", "'qos'"]),
        ("wrap", ["training_cmd"]),
        ("test_only", ["--preview"]),
        ("wait", ["--wait"]),
        ("parsable", ["last line"]),
        ("quiet", ["--quiet", "stdout"]),
        ("verbose", ["--verbose", "phalanx plan"]),
        ("version", ["sbatch --version", "params.version"]),
        ("usage", ["submit --help"]),
    ],
)
def test_options_that_sbatch_lacks_or_a_job_file_cannot_mean_are_refused(tmp_path, key, words):
    said = fault(tmp_path, f"{key}: x\n")
    for word in words:
        assert word in said


ITWINAI = """\
job_name: my_job
num_nodes: 2
num_tasks: 2
num_tasks_per_node: 1
gpus_per_node: 4
cpus_per_task: 16
memory: 64G
time: 01:00:00
partition: gpu
account: 0123
std_out: logs/${job_name}.out
err_out: logs/${job_name}-${num_nodes}x${gpus_per_node}.err
dist_strat: ddp
python_venv: .venv
pre_exec_command: "ulimit -c 0"
training_cmd: "itwinai exec --name={config_name} +pipe_key={pipe_key} s={dist_strat} n=${num_nodes} $HOME ${SCRATCH}"
config_name: config.yaml
config_file: other.yaml
pipe_key: training
scalability_nodes: "1, 2, 4"
save_script: false
submit_job: false
py_spy: false
profiling_sampling_rate: 10
debug: true
"""


def test_a_job_file_of_itwinai_loads_unchanged(tmp_path):
    loaded = from_yaml(tmp_path, ITWINAI)
    settings = loaded.config
    assert (settings.nodes, settings.ntasks, settings.ntasks_per_node, settings.gpus_per_node) == (2, 2, 1, 4)
    assert (settings.mem, settings.time, settings.account) == ("64G", "01:00:00", "0123")
    assert (settings.output, settings.error) == ("logs/my_job.out", "logs/my_job-2x4.err")
    assert (settings.strategy, settings.venv, settings.before) == ("ddp", ".venv", "ulimit -c 0")
    assert settings.training_cmd == ("itwinai exec --name=config.yaml +pipe_key=training s=ddp n=2 $HOME ${SCRATCH}")
    assert settings.scalability_nodes == (1, 2, 4)
    for key in ("py_spy", "profiling_sampling_rate", "debug"):
        assert any(note.startswith(key) for note in loaded.notes)


@pytest.mark.parametrize("key", ["mem", "mem_per_cpu", "mem_per_gpu"])
def test_of_slurms_three_ways_to_ask_for_memory_the_higher_layer_has_its_way(tmp_path, key):
    loaded = from_yaml(tmp_path, "mem: 10G\n", f"{key}=2G")
    given = {name: getattr(loaded.config, name) for name in ("mem", "mem_per_cpu", "mem_per_gpu")}
    assert {name: value for name, value in given.items() if value} == {key: "2G"}
    assert any("mem='10G'" in note for note in loaded.notes) == (key != "mem")


def test_a_job_that_must_not_start_again_is_not_asked_to_by_a_lower_layer(tmp_path):
    loaded = from_yaml(tmp_path, "requeue: true\n", "no_requeue=true")
    assert (loaded.config.sbatch.requeue, loaded.config.sbatch.no_requeue) == (None, True)
    assert any("sbatch.requeue" in note for note in loaded.notes)
    assert from_yaml(tmp_path, "mem: 1G\nmem_per_cpu: null\n").config.mem == "1G"
    assert from_yaml(tmp_path, "requeue: true\n", "no_requeue=false").config.sbatch.requeue is True


def test_two_ways_in_one_file_contradict_each_other(tmp_path):
    said = fault(tmp_path, "mem: 10G\nmem_per_cpu: 1G\n")
    assert "job.yaml:1" in said
    assert "job.yaml:2" in said


def test_modules_keep_the_order_in_which_they_were_written(tmp_path):
    text = "modules:\n  purge: force\n  load: [b, a]\n  unload: [c]\n  use: /x\n"
    assert from_yaml(tmp_path, text).config.modules.steps == [
        ("purge", ("force",)),
        ("load", ("b", "a")),
        ("unload", ("c",)),
        ("use", ("/x",)),
    ]


def test_lines_may_be_a_list(tmp_path):
    assert from_yaml(tmp_path, "before: [echo a, 'echo ${X}']\n").config.before == "echo a\necho ${X}"


def test_shell_text_keeps_the_shells_own_references_and_resolves_ours(tmp_path, monkeypatch):
    text = "before: 'echo $X ${X} $(date) ${nodes} ${oc.env:HOME_OF}'\nnodes: 3\n"
    file = tmp_path / "a.yaml"
    file.write_text(text)
    loaded = load_config([file], (), {"HOME_OF": "/h"})
    assert loaded.config.before == "echo $X ${X} $(date) 3 /h"
    assert "X" in fault(tmp_path, "name: a-${X}\n")
    for key in ("after", "exec_command", "training_cmd", "container: {pre"):
        end = "}" if "{" in key else ""
        config = from_yaml(tmp_path, f"{key}: 'a $X ${{X:-1}} $(b ${{Y}}) ${{nodes}}'{end}\n").config
        assert "a $X ${X:-1} $(b ${Y}) 1" in (
            config.after,
            config.exec_command,
            config.training_cmd,
            config.container.pre,
        )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("a.py --n {nodes} {strategy}", "a.py --n 2 fsdp"),
        ("a.py {fsdp.replicate} {num_nodes}", "a.py 1 2"),
        ("a.py {other} {a,b} ${x} {}", "a.py {other} {a,b} ${x} {}"),
        ("python -c 'print({1: 2})'", "python -c 'print({1: 2})'"),
        ("a.py {save_script} {scalability_nodes}", "a.py true 1,2,4,8"),
        ("a.py {env} {params} {fsdp} {training_cmd}", "a.py {env} {params} {fsdp} {training_cmd}"),
        ("a.py {tmpdir} {qos}", "a.py $SCRATCH/x high"),
        # What itwinai's builder fills in when a file leaves it out.
        ("a.py {config_path}/{config_name} {pipe_key}", "a.py ./config training_pipeline"),
        ("{itwinai_launcher} run", "itwinai run"),
    ],
)
def test_braces_in_training_cmd_are_exact_names_of_settings(command, expected):
    others = ("nodes=2", "strategy=fsdp", "tmpdir=!sh $SCRATCH/x", "qos=high")
    assert config(*others, f"training_cmd={command}").training_cmd == expected


def test_itwinais_launcher_is_that_of_its_environment():
    assert config("python_venv=/e/", "training_cmd={itwinai_launcher} run").training_cmd == "/e/bin/itwinai run"


@pytest.mark.parametrize(
    ("alias", "key"),
    [("err_out", "error"), ("std_err", "error"), ("pre_exec_cmd", "before"), ("experiment_name", "exp_name")],
)
def test_other_names_of_a_setting(alias, key):
    assert getattr(config(f"{alias}=x"), key) == "x"


def test_an_unset_setting_in_training_cmd_is_an_error():
    with pytest.raises(ConfigError, match="account is unset"):
        config("training_cmd=a.py {account}")


def test_shell_values_are_marked_and_come_back_from_a_run_directory(tmp_path):
    loaded = from_yaml(tmp_path, "env:\n  A: !sh ${HOME}/x\n  B: ${HOME_}\n".replace("${HOME_}", "plain"))
    assert loaded.config.env == {"A": "!sh ${HOME}/x", "B": "plain"}
    again = tmp_path / "config.yaml"
    again.write_text(run_config_text(loaded))
    assert load_config([again], (), {}).config.env == loaded.config.env
    assert "!sh" in fault(tmp_path, "partition: !sh $P\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("params: {a: !sh x}\n", 1),
        ("params:\n  a:\n    b: [1, !sh x]\n", 2),
        ("modules:\n  load: [a, !sh x]\n", 2),
        ("before: !sh x\n", 1),
        ("sbatch: {comment: !sh x}\n", 1),
    ],
)
def test_shell_values_have_no_meaning_elsewhere(tmp_path, text, line):
    said = fault(tmp_path, text)
    assert f"job.yaml:{line}" in said
    assert "!sh is for values of env, tmpdir and proxy only" in said
    assert "\n" not in said


def test_a_shell_value_can_be_part_of_shell_text_alone(tmp_path):
    text = "tmpdir: !sh $SCRATCH/t\nenv: {A: !sh '${tmpdir}/a ${USER}', B: '${tmpdir}'}\nbefore: cd ${tmpdir}\n"
    config = from_yaml(tmp_path, text).config
    assert config.env == {"A": "!sh $SCRATCH/t/a ${USER}", "B": "!sh $SCRATCH/t"}
    assert config.before == "cd $SCRATCH/t"
    assert "write !sh here too" in fault(tmp_path, text + "name: x${tmpdir}\n")


def test_a_member_of_a_series_resolves_references_anew_and_says_what_it_replaced(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("nodes: 4\noutput: ${job_name}-${nodes}.out\njob_name: base\n")
    loaded = load_config([file], ["nodes=3"], {}, member={"nodes": "2", "job_name": "m"}, member_origin="--mode runall")
    assert (loaded.config.nodes, loaded.config.output) == (2, "m-2.out")
    assert any("nodes='3' (command line)" in note and "--mode runall" in note for note in loaded.notes)


@pytest.mark.parametrize("value", ["1, 2, 4", "[1, 2, 4]", "1,2,4"])
def test_numbers_of_nodes_are_a_list_however_written(value):
    assert config(f"scalability_nodes={value}").scalability_nodes == (1, 2, 4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sbatch_args=-x", "sbatch_args = '-x' (command line): '-x': expected words such as --name=value"),
        ("srun_args=--a,b", "srun_args = '--a,b' (command line): 'b': expected words such as --name=value"),
        ("mode=all", "mode = 'all' (command line): expected one of single, runall, scaling-test"),
    ],
)
def test_faults_say_value_origin_and_what_was_expected(override, expected):
    with pytest.raises(ConfigError) as caught:
        config(override)
    assert str(caught.value) == expected


@pytest.mark.parametrize("value", ["", "0", "1,x", "-1"])
def test_other_numbers_of_nodes_are_refused(value):
    with pytest.raises(ConfigError, match="scalability_nodes"):
        config(f"scalability_nodes={value}")


def test_use_ray_is_the_launcher_of_that_name_unless_one_is_set():
    assert config("use_ray=true").launcher == "ray"
    assert config("use_ray=true", "launcher=srun").launcher == "srun"


# What a file, a command line and a run directory must all carry as it is.
_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: not text.startswith("!sh ")
)
_KEYS = st.sampled_from(["account", "sbatch.comment", "sbatch.signal", "env.A", "tmpdir", "after", "exec_file", "gres"])
_VERBS = st.permutations(["purge", "use", "load", "unload"])


@settings(deadline=None)
@given(st.dictionaries(_KEYS, _TEXTS))
def test_any_text_comes_back_from_files_and_command_lines_as_it_was(texts):
    escaped = {key: escape(text) for key, text in texts.items()}
    with TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(dump(texts), encoding="utf-8")
        loaded = load_config([file], (), {})
        file.write_text(run_config_text(loaded), encoding="utf-8")
        again = load_config([file], (), {}).config
    by_words = load_config((), [(key, text) for key, text in escaped.items() if not is_null(Plain(text))], {}).config
    for key, text in texts.items():
        section, _, name = key.partition(".")
        for config in (loaded.config, again) if is_null(Plain(text)) else (loaded.config, again, by_words):
            found = getattr(config, section)
            found = found.get(name) if isinstance(found, dict) else getattr(found, name) if name else found
            assert found == text


@settings(deadline=None)
@given(_VERBS, st.integers(1, 4))
def test_written_settings_keep_the_order_of_modules(verbs, count):
    written = {verb: "force" if verb == "purge" else ["m1", "m2"] for verb in verbs[:count]}
    expected = [(verb, ("force",) if verb == "purge" else ("m1", "m2")) for verb in verbs[:count]]
    with TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(dump({"modules": written}))
        for text in (run_config_text, lambda loaded: dump(chosen(loaded))):
            loaded = load_config([file], (), {})
            assert loaded.config.modules.steps == expected
            file.write_text(text(loaded))
        assert load_config([file], (), {}).config.modules.steps == expected
