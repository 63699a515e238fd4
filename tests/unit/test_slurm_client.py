"""Slurm's programs as they answer: texts are what Slurm 22.05.8 printed, unless a comment says otherwise."""

import os

import pytest

from phalanx.errors import PlanError, SchedulerError
from phalanx.schedulers.slurm import client, states
from phalanx.schedulers.slurm.client import Partition
from phalanx.schedulers.slurm.wait import wait_for
from tests.unit.slurm_programs import Programs

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
SQUEUE = """\
44_[3-4%2]^44^PENDING^JobArrayTaskLimit^1^0:00^5:00^0^0^main^^(null)^ok.sh^/tmp/t^
44_1^47^RUNNING^None^1^0:01^5:00^0^0^main^node1^(null)^ok.sh^/tmp/t^
43^43^FAILED^NonZeroExitCode^2^0:00^5:00^768^0^main^node[1-2]^(null)^a b|cé^/tmp/t^
45^45^FAILED^JobLaunchFailure^1^0:00^10:00^9^0^main^node1^(null)^wrap^/tmp/t^
49^49^PENDING^Dependency^1^0:00^1-00:00:00^0^0^main^^afterany:46(unfulfilled)^ok.sh^/tmp/t^
40^40^RUNNING^None^1^1:02:03^UNLIMITED^0^2^main^node2^(null)^rq^/tmp/t^
50+1^51^RUNNING^None^1^0:00^10:00^0^0^main^node1^(null)^het.sh^/tmp/t^
""".replace("^", "\x1f")
SACCT = """\
43^43^FAILED^None^2^0^5^3:0^main^node[1-2]^a b|cé^/tmp/t
45^45^FAILED^None^1^0^10^0:9^main^node1^wrap^/tmp/t
46^46^CANCELLED by 1000^None^1^2^5^0:0^main^node1^ok.sh^/tmp/t
44_1^47^COMPLETED^None^1^1^5^0:0^main^node1^ok.sh^/tmp/t
44_4^44^COMPLETED^JobArrayTaskLimit^1^1^5^0:0^main^node2^ok.sh^/tmp/t
50+0^50^COMPLETED^None^1^2^10^0:0^main^node2^het.sh^/tmp/t
""".replace("^", "\x1f")
SCONTROL = (
    "JobId=9 ArrayJobId=4 ArrayTaskId=2 ArrayTaskThrottle=2 JobName=a b=c UserId=root(0) Account=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=3 ExitCode=0:0 RunTime=00:00:02 "
    "TimeLimit=00:05:00 SubmitTime=2026-11-28T05:32:47 Partition=main NodeList=node1 BatchHost=node1 NumNodes=1 "
    "CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=1,node=1,billing=1 Command=/tmp/t/ok.sh 20 WorkDir=/tmp/t "
    "StdErr=/tmp/t/slurm-4_2.out StdIn=/dev/null StdOut=/tmp/t/slurm-4_2.out Power= TresPerNode=gres:gpu:1 \n"
)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return Programs(tmp_path / "slurm", monkeypatch)


@pytest.mark.parametrize(
    ("said", "job"),
    [
        ("123\n", "123"),
        ("123;cluster\n", "123"),
        ("Submitted batch job 123\n", "123"),
        ("Submitted batch job 123 on cluster lab\n", "123"),
        ("-- 17 node-hours left --\nbudget ok: 4821\n\n  123;lab  \nThank you for flying 2026\n", "123"),
    ],
)
def test_the_job_id_is_found_whatever_else_is_printed(slurm, said, job):
    slurm.answer("sbatch", said, "sbatch: lua: Submitted job 99\n")
    assert client.submit(["job.sh", "/run dir"], {"PATH": os.environ["PATH"]}) == job
    assert slurm.calls("sbatch") == ["--parsable job.sh /run dir"]


def test_what_travels_with_a_job_is_what_was_given_and_no_more(slurm, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    slurm.answer("sbatch", "1\n")
    client.submit(["job.sh"], {"PATH": os.environ["PATH"], "SQUEUE_FORMAT": "%i", "LC_ALL": "de_DE.UTF-8"})
    seen = slurm.environment("sbatch")
    assert (seen["SQUEUE_FORMAT"], seen["LC_ALL"]) == ("%i", "de_DE.UTF-8")
    assert "MINE" not in seen
    assert (slurm.folder / "sbatch.stdin").read_text() == ""


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        ("sbatch: error: invalid partition specified: nope\n"
         "sbatch: error: Batch job submission failed: Invalid partition name specified", "partition"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
         "account or partition"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
         "time"),
        ("sbatch: error: Invalid --time specification", "time"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos"),
        ("sbatch: error: Memory specification can not be satisfied\n"
         "sbatch: error: Batch job submission failed: Requested node configuration is not available", "mem,"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "nodes,"),
        ("sbatch: error: CPU count per node can not be satisfied", "cpus_per_task"),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", "nodes"),
        ("sbatch: error: Invalid generic resource (gres) specification", "gpus_per_node"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "constraint"),
        ("sbatch: error: Batch job submission failed: Invalid license specification", "licenses"),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's "
         "size and/or time limits)", "nodes, time or account"),
        ("sbatch: unrecognized option '--foo=1'", "sbatch_args"),
    ],
)  # fmt: skip
def test_sbatch_is_quoted_and_the_setting_named(slurm, said, setting):
    slurm.answer("sbatch", err=said + "\n", code=1)
    with pytest.raises(SchedulerError) as error:
        client.submit(["job.sh"], {"PATH": os.environ["PATH"]})
    assert said in str(error.value)
    assert f"; to change: {setting}" in str(error.value)


def test_a_submission_that_was_not_answered_may_have_arrived(slurm):
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    slurm.answer("sbatch", err=said, code=1)
    with pytest.raises(SchedulerError, match=r"may be in the queue all the same.*squeue --me"):
        client.submit(["job.sh"], {"PATH": os.environ["PATH"]})


def test_an_answer_without_a_job_id_is_shown(slurm):
    slurm.answer("sbatch", "queued, thanks\n")
    with pytest.raises(SchedulerError, match=r"no job id.*'queued, thanks'"):
        client.submit(["job.sh"], {"PATH": os.environ["PATH"]})


def test_without_slurm_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlanError, match=r"squeue is not on PATH.*login node"):
        states.ask(["1"])


def test_a_silent_controller_is_an_error_after_the_time_limit(slurm):
    slurm.hang("squeue", 20)
    with pytest.raises(SchedulerError, match=r"squeue gave no answer in 0\.3 s.*controller"):
        client.run(["squeue"], timeout=0.3)


def test_users_formats_and_filters_do_not_matter(slurm, monkeypatch):
    for name in (
        "SQUEUE_FORMAT",
        "SQUEUE_STATES",
        "SACCT_FORMAT",
        "SINFO_FORMAT",
        "SCANCEL_STATE",
        "SLURM_TIME_FORMAT",
    ):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("SLURM_CONF", "/etc/own/slurm.conf")
    client.run(["squeue"])
    seen = slurm.environment("squeue")
    assert not {"SQUEUE_FORMAT", "SQUEUE_STATES", "SACCT_FORMAT", "SINFO_FORMAT", "SCANCEL_STATE"} & set(seen)
    assert (seen["LC_ALL"], seen["SLURM_TIME_FORMAT"], seen["SLURM_CONF"]) == ("C", "standard", "/etc/own/slurm.conf")


def test_squeue_is_read_with_arrays_signals_and_odd_names(slurm):
    slurm.answer("squeue", "** maintenance on 2026-12-01 **\n" + SQUEUE)
    said = states.ask(["40", "43", "44", "45", "49", "50"], "false")
    assert slurm.calls("sacct") == []
    assert len(slurm.calls("squeue")) == 1
    assert [(one.job_id, one.number, one.task) for one in said["44"]] == [
        ("44_[3-4%2]", "44", "[3-4%2]"),
        ("44_1", "47", "1"),
    ]
    (failed,), (killed,), (waiting,), (running,), (part,) = (said[job] for job in ("43", "45", "49", "40", "50"))
    assert (failed.state, failed.exit_code, failed.signal, failed.code) == ("FAILED", 3, 0, 3)
    assert (failed.name, failed.work_dir, failed.nodes, failed.hosts) == ("a b|cé", "/tmp/t", 2, "node[1-2]")
    assert (killed.exit_code, killed.signal, killed.code) == (0, 9, 137)
    assert (waiting.reason, waiting.dependency, waiting.limit) == ("Dependency", "afterany:46(unfulfilled)", 86400)
    assert (running.elapsed, running.limit, running.restarts, running.exit_code) == (3723, None, 2, None)
    assert (part.job_id, part.base, part.number) == ("50+1", "50", "51")
    assert [one.finished for one in (failed, killed, waiting, running)] == [True, True, False, False]


def test_sacct_knows_what_squeue_has_forgotten(slurm):
    slurm.answer("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    slurm.answer("sacct", SACCT)
    said = states.ask(["43", "44", "45", "46", "50", "99"])
    assert "99" not in said
    assert [(said[job][0].code, said[job][0].elapsed, said[job][0].limit) for job in ("43", "45")] == [
        (3, 0, 300),
        (137, 0, 600),
    ]
    assert (said["46"][0].state, said["46"][0].reason) == ("CANCELLED", "1000")
    assert [(one.job_id, one.number, one.reason) for one in said["44"]] == [("44_1", "47", ""), ("44_4", "44", "")]


def test_sacct_fills_in_the_tasks_of_an_array_that_ended_long_ago(slurm):
    slurm.answer("squeue", SQUEUE.splitlines()[0] + "\n")
    slurm.answer("sacct", SACCT)
    said = states.ask(["44"])["44"]
    assert [(one.job_id, one.state) for one in said] == [
        ("44_[3-4%2]", "PENDING"),
        ("44_1", "COMPLETED"),
        ("44_4", "COMPLETED"),
    ]


def test_no_accounting_is_an_error_only_where_it_must_be(slurm):
    slurm.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    assert states.ask(["1"], "auto") == {}
    with pytest.raises(SchedulerError, match=r"sacct=false.*accounting storage is disabled"):
        states.ask(["1"], "true")


def test_a_controller_that_is_down_is_said_with_slurms_words(slurm):
    slurm.answer("squeue", err=DOWN, code=1)
    slurm.answer("scontrol", err=DOWN, code=1)
    slurm.answer("sinfo", err=DOWN, code=1)
    slurm.answer("scancel", err=DOWN, code=1)
    for call in (
        lambda: states.ask(["1"]),
        lambda: states.detail("1"),
        client.partitions,
        lambda: client.cancel(["1"]),
    ):
        with pytest.raises(SchedulerError, match=r"Unable to contact slurm controller.*down or busy: try again later"):
            call()


def test_scontrol_gives_files_and_command(slurm):
    slurm.answer("scontrol", "site banner\n" + SCONTROL)
    said = states.detail("4_2")
    assert (said.job_id, said.number, said.state, said.restarts) == ("4_2", "9", "RUNNING", 3)
    assert (said.stdout, said.command, said.name) == ("/tmp/t/slurm-4_2.out", "/tmp/t/ok.sh 20", "a b=c")
    assert (said.elapsed, said.limit, said.reason) == (2, 300, "")


def test_scontrol_of_jobs_that_wait_or_have_parts():
    array = client.job_fields("JobId=4 ArrayJobId=4 ArrayTaskId=3-5%2 JobName=x JobState=PENDING Reason=Priority")
    assert states.from_scontrol(array).job_id == "4_[3-5%2]"
    part = client.job_fields("JobId=8 HetJobId=7 HetJobOffset=1 JobName=x JobState=COMPLETED ExitCode=0:15")
    assert (states.from_scontrol(part).job_id, states.from_scontrol(part).code) == ("7+1", 143)


def test_newer_versions_split_tres_and_may_lack_fields():
    # As the manual of 23.11 has it: ReqTRES and AllocTRES instead of TRES, no Power.
    line = "JobId=5 JobName=x JobState=RUNNING Reason=None TimeLimit=UNLIMITED NumNodes=2-2 NodeList=n[1-2] " \
           "ReqTRES=cpu=2,mem=1G AllocTRES=cpu=2,mem=1G,gres/gpu:a100=2 WorkDir=/w"  # fmt: skip
    said = states.from_scontrol(client.job_fields(line))
    assert (said.nodes, said.limit, said.stdout, said.work_dir) == (2, None, None, "/w")


def test_a_forgotten_job_is_none(slurm):
    slurm.answer("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert states.detail("99") is None


def test_partitions_by_their_largest_node_with_types_of_gpus(slurm):
    slurm.answer(
        "sinfo",
        "main*|up|4|8|4000|1:00:00|gpu:2\n"
        "mixed|up|2|64|256000|1-12:00:00|gpu:a100:4(S:0-1),shard:8\n"
        "mixed|up|3|96+|512000+|1-12:00:00|gpu:h100:2(S:0),gpu:h100:2(S:1)\n"
        "cpu|down|10|128|64000|infinite|(null)\n"
        "mig|up|1|16|1000|30:00|gpu:1g.5gb:7,gpu:a100\n",
    )
    assert client.partitions() == [
        Partition("main", True, True, 4, 8, 2, 4000, 3600, ()),
        Partition("mixed", False, True, 5, 96, 4, 512000, 36 * 3600, ("a100", "h100")),
        Partition("cpu", False, False, 10, 128, 0, 64000, None, ()),
        Partition("mig", False, True, 1, 16, 8, 1000, 1800, ("1g.5gb", "a100")),
    ]


def test_cancelling_what_has_ended_is_no_error_and_what_is_not_ours_is(slurm):
    slurm.answer("scancel", err="scancel: error: Kill job error on job id 9: Invalid job id specified\n", code=1)
    client.cancel(["9", "10"])
    assert slurm.calls("scancel") == ["9 10"]
    slurm.answer("scancel", err="scancel: error: Kill job error on job id 9: Access/permission denied\n", code=1)
    with pytest.raises(SchedulerError, match=r"job id 9: Access/permission denied"):
        client.cancel(["9"])


def test_a_job_that_slurm_forgets_while_others_run_has_ended_as_was_seen(monkeypatch, capsys):
    """Slurm keeps an ended job for MinJobAge, five minutes by default; without accounting nobody else knows of it."""

    def looks(first: str) -> list[dict[str, list[states.JobState]]]:
        def at(job: str, state: str) -> states.JobState:
            return states.JobState(job, job, state, exit_code=7 if state == "FAILED" else 0)

        both = {"5": [at("5", first)], "6": [at("6", "RUNNING")]}
        return [both, {"6": [at("6", "RUNNING")]}, {"6": [at("6", "COMPLETED")]}]

    monkeypatch.setattr("time.sleep", lambda _: None)
    for first, code, words in (("COMPLETED", 0, ""), ("FAILED", 7, "job 5 ended as FAILED\n")):
        answers = iter(looks(first))
        monkeypatch.setattr(states, "ask", lambda *_, answers=answers: next(answers))
        assert wait_for(["5", "6"]) == code
        assert capsys.readouterr().err == words
    monkeypatch.setattr(states, "ask", lambda *_: {})
    assert wait_for(["5"]) == 1
    assert "forgotten" in capsys.readouterr().err
