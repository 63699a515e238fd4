"""Launcher ray without Ray: the commands, ports and folders of a node, and how agents, ranks and driver talk."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config import load_config
from phalanx.errors import ConfigError, PlanError
from phalanx.planning.facts import Facts
from phalanx.planning.plan import LaunchPlan
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program
from phalanx.rank.ports import claim, claim_block, port_blocks
from phalanx.rank.topology import Topology
from phalanx.ray_launch import agent, driver, processes
from phalanx.ray_launch.begin import words as begin
from phalanx.ray_launch.connections import DONE, Followers, Meeting, head_address, hosts
from phalanx.ray_launch.node import PORTS, Node, cpus, gpus, named, temp_folder
from phalanx.ray_launch.rank import RankFailed, receive
from phalanx.ray_launch.ranks import Ranks
from phalanx.schedulers.launcher_output import deaths

FACTS = Facts("login", 8, 0, "/venv/bin/python", "Linux", "x86_64", cwd="/home/me")
LINUX = range(32768, 61000)


def plan(*words: str, local: bool = False) -> LaunchPlan:
    config = load_config(overrides=["launcher=ray", *words], environ={}).config
    return make_plan(config, FACTS, Program("train.py", ("--lr", "1")), for_slurm=not local)


def node(job: int, environ: dict[str, str], index: int = 0) -> Node:
    block = next(iter(port_blocks(job, 0, len(PORTS), LINUX)))
    return Node(index, "10.0.0.1", named(block), cpus(None, environ), gpus(0, environ), 2, 100, Path("/tmp/r"))


# --- the command


def test_a_job_starts_one_agent_a_node_with_the_cpus_and_gpus_that_it_asked_for() -> None:
    words = plan("nodes=2", "nproc=2", "cpus_per_task=6", "gpus_per_node=2", "ray.temp_dir=/l").command
    assert {"srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--kill-on-bad-exit=1"} <= set(words)
    at = words.index("phalanx.ray_launch")
    assert words[at - 2 : at] == ("/venv/bin/python", "-m")
    options = ("--nodes=2", "--nproc-per-node=2", "--num-cpus=6", "--num-gpus=2")
    assert words[at + 1 : at + 5] == options
    assert {"--object-store-memory=100", "--start-timeout=120", "--temp-dir=/l"} <= set(words)
    assert words[-5:] == ("--", "phalanx.worker", "train.py", "--lr", "1")


def test_on_this_machine_the_agent_is_started_directly() -> None:
    words = plan("nproc=2", "ray.start_timeout=7", local=True).command
    assert words[:3] == ("/venv/bin/python", "-m", "phalanx.ray_launch")
    assert {"--num-cpus=8", "--num-gpus=0", "--start-timeout=7"} <= set(words)


def test_what_nothing_asks_for_the_nodes_look_up() -> None:
    words = plan("nodes=2", "nproc=2").command
    assert not [word for word in words if str(word).startswith(("--num-cpus", "--num-gpus"))]
    assert cpus(None, {"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "8"}) == 3
    assert cpus(None, {"SLURM_CPUS_ON_NODE": "8"}) == 8
    assert cpus(None, {}) == len(os.sched_getaffinity(0)) or cpus(None, {}) >= 1
    assert cpus(5, {"SLURM_CPUS_ON_NODE": "8"}) == 5


def test_the_agent_reads_its_options_and_leaves_the_scripts_words_alone() -> None:
    words = plan("nodes=2", "nproc=2", "cpus_per_task=6", "ray.object_store_memory=200").command
    own = [str(word) for word in words[words.index("phalanx.ray_launch") + 1 :]]
    options = agent.parse([*own, "--nodes=9", "--"])
    assert (options.nodes, options.nproc_per_node, options.num_cpus, options.object_store_memory) == (2, 2, 6, 200)
    assert options.words == ["phalanx.worker", "train.py", "--lr", "1", "--nodes=9", "--"]


@pytest.mark.parametrize("setting", ["ray.start_timeout=0", "ray.object_store_memory=74", "ray.start_timout=9"])
def test_settings_that_ray_could_not_take_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        plan("nproc=2", setting)


# --- ray start


def test_two_jobs_on_a_node_get_their_own_cpus_and_ports_that_are_nobody_elses() -> None:
    environ = {"SLURM_CPUS_PER_TASK": "2"}
    seen: list[set[int]] = []
    for job in (1001, 1002):
        words = [*node(job, environ).start(), *node(job, environ, index=1).start("10.0.0.1:20000")]
        assert words.count("--num-cpus=2") == 2
        options = dict(word.split("=", 1) for word in words if word.startswith("--") and "port=" in word)
        seen.append({int(port) for port in options.values()} - {0})
        assert options["--min-worker-port"] == options["--max-worker-port"] == "0"  # the kernel's choice
    assert len(seen[0]) >= 8
    assert not seen[0] & seen[1]
    assert not (seen[0] | seen[1]) & set(LINUX)


def test_the_head_leads_and_the_others_join_it_and_each_can_be_told() -> None:
    head, other = node(7, {}).start(), node(7, {}, index=1).start("10.0.0.1:20217")
    assert "--head" in head
    assert "--address=10.0.0.1:20217" in other
    assert "--head" not in other
    assert all({"--block", "--include-log-monitor=false"} <= set(words) for words in (head, other))
    (resources,) = (word for word in other if word.startswith("--resources="))
    assert json.loads(resources.partition("=")[2]) == {"phalanx_rank": 2, "phalanx_node_1": 1}
    assert "--object-store-memory=104857600" in head


def test_ray_gets_a_secret_and_no_other_cluster_and_says_nothing_outside() -> None:
    environ = node(7, {}).environment({"RAY_ADDRESS": "other:1", "HOME": "/h", "RAY_TMPDIR": "/x"}, "secret", 60)
    assert "RAY_ADDRESS" not in environ
    assert (environ["RAY_AUTH_MODE"], environ["RAY_AUTH_TOKEN"]) == ("token", "secret")
    assert (environ["RAY_USAGE_STATS_ENABLED"], environ["RAY_TMPDIR"], environ["HOME"]) == ("0", "/tmp/r", "/h")


def test_blocks_of_ports_have_none_in_common_and_one_in_use_is_passed_over() -> None:
    blocks = list(port_blocks(1001, 0, 10, LINUX))
    assert len({port for block in blocks for port in block}) == 10 * len(blocks) == 12000
    firsts = [next(iter(port_blocks(job, step, 10, LINUX)))[0] for job in range(1000, 1020) for step in range(10)]
    assert len(set(firsts)) == 200
    assert not {port for block in port_blocks(5, 0, 10, range(25000, 61000)) for port in block} & set(
        range(25000, 61000)
    )
    some = list(port_blocks(os.getpid(), 0, 10))[:4]
    with socket.socket() as other:
        other.bind(("", some[0][7]))
        other.listen()
        found = claim_block(some)
        assert found is not None
        block, held = found
        with held:
            assert block == some[1]
            again = claim_block(some)
            assert again is not None
            assert again[0] == some[2]
            again[1].close()
            assert claim_block(some[:2]) is None
    free = claim(some[1])
    assert free is not None
    free.close()


@pytest.mark.parametrize(
    ("base", "start"), [("/tmp/{}", "/tmp/{}/ray-1001-"), ("/tmp/{}" + "x" * 15, "/tmp/{}" + "x" * 15 + "/r-")]
)
def test_rays_folder_has_a_path_that_is_short_enough_for_its_sockets(base: str, start: str) -> None:
    mine = f"p{os.getpid():07}"
    base, start = base.format(mine), start.format(mine)
    made = [temp_folder(None, "1001", {"TMPDIR": base}) for _ in range(2)]
    try:
        assert made[0] != made[1]
        for folder in made:
            assert str(folder).startswith(start)
            socket_path = folder / "session_2026-01-31_23-59-59_123456_1234567" / "sockets" / "plasma_store"
            assert len(os.fsencode(socket_path)) <= 107
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(base)


def test_where_no_short_path_is_rays_folder_is_in_tmp_unless_the_user_says_where(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    made = temp_folder(None, "1001", {"TMPDIR": str(long)})
    made.rmdir()
    assert made.parent == Path("/tmp")
    with pytest.raises(PlanError, match=r"ray\.temp_dir='.*x' has \d+ letters.*at most \d+"):
        temp_folder(str(long), "1001", {})
    with pytest.raises(PlanError, match=r"cannot make a folder for Ray in /proc/no.*set ray\.temp_dir"):
        temp_folder("/proc/no", "1001", {})


# --- agents among each other


def slurm_step(rank: int, run_dir: Path) -> dict[str, str]:
    return {
        **{"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"},
        **{"SLURM_NODEID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
        **{"SLURM_STEP_NODELIST": "lab[07-08]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "PHALANX_RUN_DIR": str(run_dir)},
    }


def meeting(rank: int, run_dir: Path, limit: float = 20) -> Meeting:
    environ = slurm_step(rank, run_dir)
    return Meeting(Topology.from_environ(environ), environ, limit)


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made
        for key in list(made.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


def turn(selector: selectors.BaseSelector, until: Callable[[], object], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < limit
        for key, _ in selector.select(0.05):
            key.data()


def test_another_nodes_agent_finds_the_first_learns_where_ray_is_and_when_all_is_over(
    tmp_path: Path, selector: selectors.BaseSelector
) -> None:
    listener = claim(iter(port_blocks(77, 0, 10)).__next__())
    assert listener is not None
    followers = Followers(selector, listener, "s" * 64, "10.0.0.1:20770")
    found: list[tuple[socket.socket, str, str]] = []
    joining = threading.Thread(target=lambda: found.append(meeting(1, tmp_path).join()))
    joining.start()
    first = meeting(0, tmp_path)
    first.publish(listener.getsockname()[1], "s" * 64)
    (secret,) = (tmp_path / "rendezvous").glob("*.token")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert "s" * 64 not in "".join(path.read_text() for path in (tmp_path / "rendezvous").glob("*.json"))
    turn(selector, lambda: found)
    joining.join()
    head, address, token = found[0]
    assert (address, token, followers.busy) == ("10.0.0.1:20770", "s" * 64, True)
    followers.end()
    assert head.recv(64) == DONE
    head.close()
    turn(selector, lambda: not followers.busy)
    first.forget()
    assert not list((tmp_path / "rendezvous").iterdir())


def test_whoever_does_not_know_the_secret_learns_nothing(selector: selectors.BaseSelector) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    followers = Followers(selector, listener, "s" * 64, "10.0.0.1:20770")
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"let me in\n")
        limit = time.monotonic() + 1
        turn(selector, lambda: time.monotonic() > limit)
        assert stranger.recv(64) == b""
    assert not followers.busy


def test_a_head_that_is_silent_or_out_of_reach_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"waited 0 s for the Ray head on lab07.*ray\.start_timeout"):
        meeting(1, tmp_path, 0.1).join()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    meeting(0, tmp_path).publish(port, "secret")
    with pytest.raises(PlanError, match=rf"can't reach the Ray head at \S+:{port} \(Connection refused\)"):
        meeting(1, tmp_path).join()


def test_addresses_and_hosts(tmp_path: Path) -> None:
    environ = slurm_step(0, tmp_path)
    assert hosts(environ) == ["lab07", "lab08"]
    assert head_address(Topology(0, 1, 0, 1, 0, 1, None, None, "single"), {}) == "127.0.0.1"
    two = Topology.from_environ(environ)
    assert head_address(two, {**environ, "MASTER_ADDR": "10.9.8.7"}) == "10.9.8.7"
    with pytest.raises(PlanError, match="localhost has no address that other nodes can reach: set interface"):
        head_address(two, {**environ, "MASTER_ADDR": "localhost"})


def test_a_step_of_other_tasks_than_planned_is_refused(tmp_path: Path) -> None:
    options = agent.parse(["--nodes=3", "--", "phalanx.worker", "s.py"])
    with pytest.raises(PlanError, match="3 nodes, one process each, and this is one of 2 on 2"):
        agent.Agent(options, slurm_step(0, tmp_path))


# --- an agent and its ranks


class Worker:
    """What Ray's worker does, on the other side of the socket."""

    def __init__(self, selector: selectors.BaseSelector, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        for key, _ in selector.select(5):
            key.data()
        self.terminal, self.given = receive(self.socket)
        for number in self.terminal:
            os.close(number)

    def say(self, **what: int) -> None:
        self.socket.sendall(json.dumps(what).encode() + b"\n")


@pytest.fixture
def ranks(selector: selectors.BaseSelector) -> Iterator[tuple[Ranks, Path]]:
    folder = temp_folder(None, "77", {})
    yield Ranks(selector, folder / "agent", {"node": 1, "environ": {"LONG": "x" * 100_000}}), folder / "agent"
    (folder / "agent").unlink()
    folder.rmdir()


def test_a_rank_gets_our_terminal_and_environment_and_its_death_is_told(
    ranks: tuple[Ranks, Path], selector: selectors.BaseSelector, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = [Worker(selector, ranks[1]) for _ in range(3)]
    assert all(len(worker.terminal) == 3 for worker in workers)
    assert workers[0].given == {"node": 1, "environ": {"LONG": "x" * 100_000}}
    for rank, (worker, code) in enumerate(zip(workers, (0, 3, -9), strict=True), 4):
        worker.say(rank=rank, pid=2**22 + rank)  # no process has such a number
        worker.say(code=code)
        worker.socket.close()
    limit = time.monotonic() + 1
    turn(selector, lambda: time.monotonic() > limit)
    host = socket.gethostname()
    said = capfd.readouterr().err
    assert sorted(said.splitlines()) == [
        f"ray: rank 5 on {host} ended with exit code 3",
        f"ray: rank 6 on {host} was killed by signal 9 (SIGKILL)",
    ]
    assert {(death.rank, death.host, death.code) for death in deaths(said, "ray")} == {(5, host, 3), (6, host, -9)}
    assert not ranks[0].busy


@pytest.mark.parametrize("by", ["ray", "us"])
def test_a_rank_that_ray_or_we_end_is_not_to_blame_and_has_time_but_not_for_ever(
    ranks: tuple[Ranks, Path],
    selector: selectors.BaseSelector,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    monkeypatch.setattr("phalanx.ray_launch.ranks.PATIENCE", 0.5)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
        worker = Worker(selector, ranks[1])
        worker.say(rank=0, pid=process.pid)
        for key, _ in selector.select(5):
            key.data()
        if by == "ray":
            worker.socket.close()
            turn(selector, lambda: ranks[0].busy)
        else:
            ranks[0].end()
        assert process.poll() is None
        start = time.monotonic()
        while ranks[0].busy:
            ranks[0].look()
            assert time.monotonic() - start < 20
            time.sleep(0.02)
        assert time.monotonic() - start > 0.3
        if by == "us":
            worker.say(code=-9)
            worker.socket.close()
        limit = time.monotonic() + 0.3
        turn(selector, lambda: time.monotonic() > limit)
    assert process.wait(5) in (-signal.SIGKILL, 0)  # 0: its end was taken by the one who waited for it
    assert capfd.readouterr().err == ""


def test_a_child_ends_with_its_parent_and_hears_ctrl_c_again() -> None:
    child = "import signal, time; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True); time.sleep(60)"
    words = f"[sys.executable, '-c', {child!r}]"
    parent = (
        "import signal, subprocess, sys; from phalanx.ray_launch.begin import words\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        f"child = subprocess.Popen(words(signal.SIGTERM, {words}))\n"
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline().strip() for _ in range(2))
        process.kill()
        assert lines[1] == "set()"
        assert process.stdout.read() == ""  # until the child, too, has closed it
    assert begin(signal.SIGTERM, ["x"])[-2:] == [str(os.getpid()), "x"]


# --- the driver


def test_nodes_that_have_not_joined_are_named() -> None:
    there = [{"CPU": 2.0, "phalanx_node_0": 1.0}, {"CPU": 2.0, "phalanx_node_2": 1.0}]
    assert driver.absent(["a", "b", "c"], there) == ["b"]
    assert driver.absent(["a"], there) == []


def test_the_driver_waits_for_all_nodes_and_no_longer_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    order = driver.Order("a:1", ["lab07", "lab08"], 1, ["s.py"], "/r/logs/ray-node0.log", "/s", 1.0, 9)
    joined = [{"Alive": True, "Resources": {"CPU": 2.0, f"phalanx_node_{index}": 1.0}} for index in range(2)]
    gone = {**joined[1], "Alive": False}
    answers = [joined[:1], [joined[0], gone], joined]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: answers.pop(0)))
    assert len(driver._wait_for_nodes(order, time.monotonic() + 20)) == 2
    answers += [[joined[0], gone]] * 2
    said = r"lab08 did not join the Ray head on lab07 within 9 s: see .* /r/logs; more time: ray\.start_timeout"
    with pytest.raises(PlanError, match=said):
        driver._wait_for_nodes(order, time.monotonic() - 1)


@pytest.mark.parametrize(
    ("cpus", "gpus", "nproc", "share"),
    [
        ((8, 8), (4, 4), 4, {"CPU": 2, "GPU": 1}),
        ((8, 6), (0, 0), 2, {"CPU": 3}),
        ((2, 2), (0, 0), 3, {"CPU": 0.6666}),
        ((8, 8), (4, 4), 2, {"CPU": 4, "GPU": 2}),
        ((8, 8), (1, 1), 2, {"CPU": 4}),
    ],
)
def test_each_worker_takes_its_share_of_the_smallest_node(
    cpus: tuple[int, int], gpus: tuple[int, int], nproc: int, share: dict[str, float]
) -> None:
    nodes = [{"CPU": cpu, "GPU": gpu} if gpu else {"CPU": cpu} for cpu, gpu in zip(cpus, gpus, strict=True)]
    assert driver.shares(nodes, nproc) == {"phalanx_rank": 1, **share}
    assert all(driver.shares(nodes, nproc)["CPU"] * nproc <= cpu for cpu in cpus)


def test_the_exit_code_is_the_failed_ranks() -> None:
    assert driver.failed_with([RankFailed(1, 3)]) == 3
    assert driver.failed_with([RankFailed(0, -15), RankFailed(1, 7)]) == 7
    assert driver.failed_with([RankFailed(0, -9)]) == 137
    assert driver.failed_with([RuntimeError("the actor died")]) is None
    assert replace(driver.Order("a", ["h"], 1, ["w"], "l", "s", 1.0, 2), nproc=2).nproc == 2


def test_what_ray_said_last_is_shown_without_what_says_that_all_is_well(tmp_path: Path) -> None:
    log, logs = tmp_path / "log", tmp_path / "session_2026-01-01_00-00-00_1_1" / "logs"
    logs.mkdir(parents=True)
    log.write_text(
        "2026-11-28 08:44:02,728\tSUCC scripts.py:1250 -- started\nSome Ray subprocesses exited unexpectedly:\n"
    )
    (logs / "raylet.out").write_text(
        "[2026-11-28 08:50:02,997 I 23106 23106] (raylet) fine\n[state-dump] 1\n"
        "[2026-11-28 08:50:02,998 E 23106 23106] (raylet) no memory\n"
    )
    shown = processes.last_words(log, tmp_path)
    assert shown.splitlines() == [
        f"The last lines of {log}:",
        "  Some Ray subprocesses exited unexpectedly:",
        "  --- raylet.out",
        "  [2026-11-28 08:50:02,998 E 23106 23106] (raylet) no memory",
    ]
    assert "no memory" in log.read_text()
    assert processes.last_words(tmp_path / "none", None) == f"{tmp_path / 'none'} is empty"


def test_without_ray_the_agent_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "find_spec", lambda name: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert agent.main(["--", "phalanx.worker", "s.py"]) == 2
    assert "pip install 'phalanx[ray]'" in capsys.readouterr().err
