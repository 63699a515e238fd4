"""One attempt at a time in a run directory. What is right is said by the kernel (processes, links), by stand-ins for
Slurm's programs, and by counting who won."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx import claims
from phalanx.claims import Holder, InUseError, Job, __main__, holder
from phalanx.processes import Process, this_place, this_process
from phalanx.schedulers.slurm import jobs
from tests.unit.slurm_programs import Programs

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
JOB = Job("alpha", "12", 0, "train")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "PHALANX_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Answers for cluster alpha, where job 12 was submitted as `submitted` says."""
    programs = Programs(tmp_path / "slurm", monkeypatch)

    def answer(state, cluster="alpha", name="train", submitted=None, restarts=0):
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(submitted or time.time() - 100))
        said = f"JobId=12 JobName={name} UserId=u(1) JobState={state} Restarts={restarts} SubmitTime={stamp} X=1\n"
        program = programs.folder / "bin" / "scontrol"
        job = f"echo '{said}'" if state else "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
        program.write_text(
            f'#!/bin/bash\nif [ "$2" = config ]; then echo "ClusterName             = {cluster}"; exit; fi\n{job}\n'
        )

    return answer


def process_of(pid, **other):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    host, boot, space = this_place()
    return replace(Process(host, pid, fields[19], boot, space), **other)


def held_by(run_dir, **fields):
    """Claim the directory for somebody else."""
    return claims.take(run_dir, Holder(**{"host": platform.node(), "since": time.time(), **fields}))


def me(**fields):
    return replace(claims.of_this_process(), **fields)


def gone():
    with subprocess.Popen(["true"]) as process:
        return process_of(process.pid)


def test_a_run_directory_is_claimed_released_and_claimed_again(tmp_path):
    first = claims.take(tmp_path, me())
    assert claims.current(tmp_path).process == this_process()
    first.release()
    assert claims.current(tmp_path) is None
    with claims.claimed(tmp_path, me()):
        assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["1.json", "1.released", "2.json"]
    assert claims.current(tmp_path) is None


def test_a_paused_holder_is_there_and_a_killed_one_is_not(tmp_path):
    with subprocess.Popen(SLEEP) as process:
        held_by(tmp_path, process=process_of(process.pid))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(InUseError, match=f"pid {process.pid} on host {platform.node()}.*sign of life.*--take-over"):
            claims.take(tmp_path, me())
        process.kill()
        process.wait()
    assert claims.take(tmp_path, me()).number == 2


def test_the_number_of_a_holder_that_another_process_has_now_means_nothing(tmp_path):
    held_by(tmp_path, process=process_of(os.getppid(), started="1"))
    assert claims.take(tmp_path, me()).number == 2


def test_ranks_of_a_killed_command_are_waited_for(tmp_path, capsys):
    environment = {**os.environ, "PHALANX_LAUNCH_ID": "feed1234"}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"], env=environment) as rank:
        held_by(tmp_path, process=gone(), launch="feed1234")
        claims.take(tmp_path, me())
        assert rank.poll() is not None
    assert f"(pid {rank.pid}): waiting" in capsys.readouterr().err


@pytest.mark.parametrize("place", [{"host": "elsewhere"}, {"boot": "another"}, {"space": "pid:[1]"}])
def test_a_process_of_another_place_is_never_taken_for_gone(tmp_path, place):
    claim = held_by(tmp_path, process=replace(gone(), **place))
    os.utime(claim.folder / "1.json", (1, 1))  # however old
    with pytest.raises(InUseError):
        claims.take(tmp_path, me())
    assert claims.take(tmp_path, me(), take_over=True).number == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"state": "RUNNING"}, "Slurm says that the job is RUNNING"),
        ({"state": "PENDING", "restarts": 1}, "PENDING"),
        ({"state": "COMPLETING"}, "COMPLETING"),
        ({"state": "SUSPENDED"}, "SUSPENDED"),
        ({"state": "COMPLETED", "cluster": "beta"}, "only cluster alpha can tell.* this is cluster beta"),
        ({"state": ""}, "wrote something within the last 60 s"),
        ({"state": "RUNNING", "name": "another"}, "wrote something within the last 60 s"),
        ({"state": "TIMEOUT"}, None),
        ({"state": "CANCELLED"}, None),
    ],
)
def test_a_job_has_ended_only_by_its_own_clusters_word(tmp_path, slurm, answer, why):
    slurm(**answer)
    held_by(tmp_path, job=JOB)
    if why is None:
        assert claims.take(tmp_path, me()).number == 2
    else:
        with pytest.raises(InUseError, match=f"job 12 of cluster alpha.*{why}"):
            claims.take(tmp_path, me())


@pytest.mark.parametrize("answer", [{"state": ""}, {"state": "RUNNING", "submitted": 1000}])
def test_a_job_that_its_cluster_forgot_is_gone_once_it_is_silent(tmp_path, slurm, monkeypatch, answer):
    if "submitted" in answer:  # later than the claim
        answer = {**answer, "submitted": time.time() + answer["submitted"]}
    slurm(**answer)
    held_by(tmp_path, job=JOB)
    monkeypatch.setattr("phalanx.claims.held.silence", lambda _: 61.0)
    assert claims.take(tmp_path, me()).number == 2


def test_without_slurm_a_job_is_never_taken_for_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    held_by(tmp_path / "run", job=JOB)
    with pytest.raises(InUseError, match="Slurm can't be asked from here"):
        claims.take(tmp_path / "run", me())


def test_what_goes_on_in_a_jobs_place_inherits_its_claim(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # nobody can be asked
    batch = {"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n", "SLURM_CLUSTER_NAME": "alpha"}
    held_by(tmp_path / "run", job=JOB)
    requeued = holder.of_batch_script({**batch, "SLURM_RESTART_COUNT": "1"}, None)
    assert claims.take(tmp_path / "run", requeued).number == 2
    again = replace(requeued, token="other")
    with pytest.raises(InUseError):
        claims.take(tmp_path / "run", again)
    other = holder.of_batch_script({**batch, "SLURM_CLUSTER_NAME": "beta", "SLURM_RESTART_COUNT": "2"}, None)
    with pytest.raises(InUseError):
        claims.take(tmp_path / "run", other)
    next_in_chain = holder.of_batch_script({**batch, "SLURM_JOB_ID": "13"}, "12")
    assert claims.take(tmp_path / "run", next_in_chain).number == 3
    within = me(job=next_in_chain.job)
    assert claims.take(tmp_path / "run", within).number == 4
    with subprocess.Popen(SLEEP) as process:
        beside = replace(within, process=process_of(process.pid), token="beside")
        with pytest.raises(InUseError):
            claims.take(tmp_path / "run", beside)
        process.kill()


def test_an_old_listing_and_an_old_look_break_no_living_claim(tmp_path, monkeypatch):
    """As other clients of NFS show them for a while; making a name exclusively is what no cache can answer."""
    held_by(tmp_path, process=gone())
    with subprocess.Popen(SLEEP) as process:
        held_by(tmp_path, process=process_of(process.pid))
        folder = tmp_path / "claims"
        listing = [entry for entry in os.scandir(folder) if entry.name == "1.json"]
        real = Path.exists
        monkeypatch.setattr(claims.os, "scandir", lambda _: _Listing(listing))
        seen = []
        monkeypatch.setattr(
            Path, "exists", lambda path: bool(seen) and real(path) if path.name == "2.json" else real(path)
        )
        link = os.link

        def link_and_see(*words):
            seen.append(words)
            return link(*words)

        monkeypatch.setattr(claims.os, "link", link_and_see)
        with pytest.raises(InUseError, match=f"pid {process.pid} "):
            claims.take(tmp_path, me())
        assert len(seen) == 1  # it tried to make the claim that it believed to be the next one
        process.kill()


class _Listing(list):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_a_claim_that_is_taken_over_is_not_released_by_its_former_holder(tmp_path):
    with subprocess.Popen(SLEEP) as process:
        former = held_by(tmp_path, process=process_of(process.pid))
        claims.take(tmp_path, me(), take_over=True)
        former.release()
        assert claims.current(tmp_path).process == this_process()
        process.kill()


def test_without_hard_links_a_name_is_made_exclusively(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with subprocess.Popen(SLEEP) as process:
        held_by(tmp_path, process=process_of(process.pid))
        with pytest.raises(InUseError, match=str(process.pid)):
            claims.take(tmp_path, me())
        process.kill()
    (tmp_path / "claims" / "2.json").touch()  # its maker was killed before it wrote
    monkeypatch.setattr(claims, "_READS", 2)
    with pytest.raises(InUseError, match="can't be read"):
        claims.take(tmp_path, me())
    assert [path.name for path in (tmp_path / "claims").iterdir() if "draft" in path.name] == []


def test_a_link_whose_answer_was_lost_is_ours(tmp_path, monkeypatch):
    link = os.link

    def twice(*words):
        link(*words)
        link(*words)

    monkeypatch.setattr(os, "link", twice)
    assert claims.take(tmp_path, me()).number == 1


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "claims").write_text("")
    with pytest.raises(claims.PlanError, match="cannot claim the run directory"):
        claims.take(tmp_path, me())


def test_taking_over_means_the_holder_that_was_there_and_nobody_who_came_since(tmp_path, monkeypatch):
    held_by(tmp_path, process=replace(gone(), host="elsewhere"))
    with subprocess.Popen(SLEEP) as process:
        link = os.link

        def after_another(*words):
            monkeypatch.setattr(os, "link", link)
            claims.take(tmp_path, me(process=process_of(process.pid), token="quicker"), take_over=True)
            link(*words)

        monkeypatch.setattr(os, "link", after_another)
        with pytest.raises(InUseError, match=f"pid {process.pid} "):
            claims.take(tmp_path, me(), take_over=True)
        process.kill()


RACER = """
import sys
from pathlib import Path
from phalanx import claims
print("ready", flush=True)
for line in sys.stdin:
    me = claims.of_this_process()
    try:
        claims.take(Path(line.strip()), me)
        print("won", flush=True)
    except claims.InUseError:
        print("lost", flush=True)
"""


def test_of_two_that_break_a_dead_claim_at_once_exactly_one_wins_a_thousand_times(tmp_path):
    dead, rounds = gone(), 1000
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER], text=True, bufsize=1, stdin=-1, stdout=-1) for _ in range(2)
    ]
    won = []
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
        for number in range(rounds):
            held_by(tmp_path / str(number), process=dead)
            for racer in racers:
                racer.stdin.write(f"{tmp_path / str(number)}\n")
            won.append([racer.stdout.readline() for racer in racers])
    finally:
        for racer in racers:
            racer.communicate()
    assert [sorted(both) for both in won] == [["lost\n", "won\n"]] * rounds
    assert len({tuple(both) for both in won}) == 2  # each of them won at times
    assert {len(list((tmp_path / str(number) / "claims").iterdir())) for number in range(rounds)} == {2}


# What a job's script asks


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alpha")
    (tmp_path / "jobs").mkdir()
    return tmp_path / "jobs"


def test_a_job_is_told_which_file_to_make_at_its_end(tmp_path, job):
    released = __main__.main(tmp_path)
    assert released == str(tmp_path / "claims" / "1.released")
    said = json.loads((tmp_path / "claims" / "1.json").read_text())
    assert (said["job"]["cluster"], said["job"]["number"], said["process"]) == ("alpha", "13", None)


@pytest.mark.parametrize(
    ("left", "answer", "reason"),
    [
        ({"12.exit": "0"}, "end 0", "job 12 before it in the chain ended well"),
        ({"12.exit": "3"}, "end 3", "failed with exit code 3"),
        ({"12.exit": "143", "12.stopped": "the job was preempted"}, None, None),
        ({"12.start": "1"}, None, None),  # killed: by its time limit, or with its node
        ({}, None, None),
    ],
)
def test_a_chain_ends_with_what_ended_well_or_failed(tmp_path, job, capsys, left, answer, reason):
    for name, text in left.items():
        (job / name).write_text(text + "\n")
    (job / "13.exit").write_text("1\n")  # of an earlier start
    (job / "13.json").write_text(json.dumps({"job_id": "13", "after": "12"}))
    assert __main__.main(tmp_path) == (answer or str(tmp_path / "claims" / "1.released"))
    assert not (job / "13.exit").exists()
    if reason:
        assert reason in capsys.readouterr().err
        assert reason in (job / "13.notrun").read_text()
        assert not (tmp_path / "claims").exists()


def test_a_job_whose_directory_is_in_use_ends_before_its_launch(tmp_path, job, capsys):
    held_by(tmp_path, process=process_of(os.getppid()))
    assert __main__.main(tmp_path) == "end 2"
    assert "is in use" in (job / "13.notrun").read_text()


def test_a_directory_named_by_a_number_is_not_another_jobs_of_that_number(tmp_path, job, monkeypatch):
    """As `sbatch FILE` makes it, on two clusters that share a file system, and after a counter's reset."""
    run_dir = tmp_path / "job-13"
    (run_dir / "jobs").mkdir(parents=True)
    claimed = str(run_dir / "claims")
    assert __main__.main(run_dir) == f"{claimed}/1.released"
    (run_dir / "claims" / "1.released").touch()
    assert __main__.main(run_dir) == "end 2"  # the number again, and no restart
    assert "another job with this number" in (run_dir / "jobs" / "13.notrun").read_text()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert __main__.main(run_dir) == f"{claimed}/2.released"
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "beta")
    assert __main__.main(run_dir) == "end 2"
    (found,) = jobs.of_run(run_dir)
    assert (found.job_id, found.cluster, found.by_hand) == ("13", "alpha", True)
