"""Ranks of one launch meet at a port that is theirs, and never at one of another launch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import TopologyError
from phalanx.rank import rendezvous
from phalanx.rank.rendezvous import interface_address, launch_key, meet, own_host
from phalanx.rank.topology import Topology


@pytest.fixture(autouse=True)
def _ports_are_given_up() -> Iterator[None]:
    yield
    while rendezvous._kept:
        rendezvous._kept.pop().close()


def step(rank: int, nodes: str = "1", job: str = "70001", step: str = "0", **more: str) -> dict[str, str]:
    """The variables of a task of a step of 4."""
    per_node = 4 // int(nodes)
    said = {"PROCID": str(rank), "LOCALID": str(rank % per_node), "NODEID": str(rank // per_node)}
    said |= {"STEP_ID": step, "JOB_ID": job, "NTASKS": "4", "STEP_NUM_TASKS": "4", "STEP_NUM_NODES": nodes}
    said |= {"STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})", "STEP_NODELIST": f"lab[1-{nodes}]"}
    return {f"SLURM_{name}": value for name, value in said.items()} | more


def key(environ: dict[str, str]) -> str | None:
    return launch_key(Topology.from_environ(environ), environ)


def mpi(rank: int, transport: str, jobid: str, uri: str, **more: str) -> dict[str, str]:
    """As Open MPI 4.1.4 gave them to a rank within a Slurm job of two nodes; those of node 2 lie below the step of
    mpirun's own daemons."""
    said = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2)}
    said |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_num_nodes": "2", "PMIX_NAMESPACE": jobid}
    said |= {"OMPI_MCA_orte_precondition_transports": transport, "OMPI_MCA_ess_base_jobid": jobid}
    said |= {"OMPI_MCA_orte_hnp_uri": uri, "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NODEID": str(rank // 2)}
    if rank >= 2:
        said |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "node2"}
    return said | more


FIRST = ("6076072b6a285d69-4b124affe04e58df", "1265762305", "1265762304.0;tcp://10.77.0.11:33371")
SECOND = ("7e2756a9e87abaa9-c345987537970fe3", "1261830145", "1261830144.0;tcp://10.77.0.11:39833")


def test_all_tasks_of_a_step_share_a_key_and_no_other_step_has_it() -> None:
    assert {key(step(rank, "2")) for rank in range(4)} == {"70001.0.0"}
    others = [step(0, step="1"), step(0, job="70002"), step(0, SLURM_RESTART_COUNT="1"), step(0, PHALANX_LAUNCH_ID="x")]
    assert len({key(other) for other in others} | {"70001.0.0"}) == 5


def test_all_ranks_of_an_mpirun_share_a_key_and_the_next_mpirun_has_another() -> None:
    first = {key(mpi(rank, *FIRST)) for rank in range(4)}
    assert len(first) == 1
    second = {key(mpi(rank, *SECOND)) for rank in range(4)}
    assert len(second) == 1
    assert first != second
    assert {key(mpi(rank, *FIRST, SLURM_RESTART_COUNT="1")) for rank in range(4)}.isdisjoint(first)
    newer = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    newer["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2"  # Open MPI 5 has a name space of that form, and not the others
    assert key(newer | {"PMIX_NAMESPACE": "prterun-node1-17@1"}) != key(
        newer | {"PMIX_NAMESPACE": "prterun-node1-99@1"}
    )


def test_mpich_gives_nothing_that_is_a_launchs_own_so_the_command_must() -> None:
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert key(mpich) is None
    assert key(mpich | {"PHALANX_LAUNCH_ID": "70001.0.123/45"}) == "0.0.70001.0.123_45"


def test_ranks_that_nothing_tells_apart_from_another_launchs_keep_the_derived_port(tmp_path: Path) -> None:
    plain = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert meet(Topology.from_environ(plain), plain, tmp_path) is None
    for environ in (step(0, MASTER_PORT="29611"), step(0, MASTER_ADDR="localhost:29611"), {}):
        assert meet(Topology.from_environ(environ), environ, tmp_path) is None
    assert not (tmp_path / "rendezvous").exists()


def meet_all(run_dir: Path, **more: str) -> set[tuple[str, int] | None]:
    """Rank 0 comes last."""
    found = []

    def one(rank: int) -> None:
        environ = step(rank, **more)
        found.append(meet(Topology.from_environ(environ), environ, run_dir, patience=20))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (3, 2, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    one(0)
    for thread in threads:
        thread.join()
    assert len(found) == 4
    return set(found)


def test_all_ranks_agree_on_a_port_that_is_bound(tmp_path: Path) -> None:
    ((host, port),) = filter(None, meet_all(tmp_path))
    assert host == "127.0.0.1"
    with socket.socket() as probe, pytest.raises(OSError, match="in use"):
        probe.bind(("", port))


def test_a_launch_after_another_in_one_run_directory_does_not_meet_at_the_old_place(tmp_path: Path) -> None:
    (first,) = meet_all(tmp_path)
    (second,) = meet_all(tmp_path, SLURM_RESTART_COUNT="1")
    (third,) = meet_all(tmp_path, PHALANX_LAUNCH_ID="chain-2")
    assert len({first, second, third}) == 3


def test_a_port_in_use_is_passed_over_by_all(tmp_path: Path) -> None:
    derived = Topology.from_environ(step(0)).master_port
    assert derived is not None
    with socket.socket() as other:
        other.bind(("", derived))
        other.listen()
        ((_, port),) = filter(None, meet_all(tmp_path))
    assert port != derived
    assert 20000 <= port < 32000


def test_a_rank_that_waits_in_vain_says_for_what_and_where(tmp_path: Path) -> None:
    meet(Topology.from_environ(step(0)), step(0), tmp_path)  # of an earlier launch
    late = step(3, SLURM_RESTART_COUNT="1")
    with pytest.raises(TopologyError) as raised:
        meet(Topology.from_environ(late), late, tmp_path, patience=0.1)
    for part in ("rank 3", socket.gethostname(), str(tmp_path / "rendezvous/70001.0.1.json"), "MASTER_PORT"):
        assert part in str(raised.value)


def test_when_no_port_is_free_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rendezvous, "claim", lambda _ports: None)
    with pytest.raises(TopologyError, match=r"no port is free.*set MASTER_PORT"):
        meet(Topology.from_environ(step(0)), step(0), tmp_path)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that resolve; this host is called lab1."""
    known = {"lab1"}

    def resolve(name: str, *_: object) -> list[str]:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return ["address"]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "gethostname", lambda: "lab1")
    monkeypatch.setattr(rendezvous, "_routed_address", lambda: "10.9.8.7")
    return known


def host(**more: str) -> str:
    environ = step(0, "2", **more)
    return own_host(Topology.from_environ(environ), environ)


def test_the_host_is_what_the_user_the_site_or_slurm_calls_it(names: set[str]) -> None:
    names |= {"jw07", "jw07i", "jw07i.domain"}
    assert host() == "lab1"
    assert host(SLURMD_NODENAME="jw07") == "jw07"
    assert host(SLURMD_NODENAME="jw07", PHALANX_HOST_SUFFIX="i") == "jw07i"
    assert host(SLURMD_NODENAME="jw07.domain", PHALANX_HOST_SUFFIX="i") == "jw07i.domain"
    assert host(SLURMD_NODENAME="jw07", PHALANX_HOST_SUFFIX="i", MASTER_ADDR="10.1.2.3") == "10.1.2.3"


def test_a_name_that_does_not_resolve_is_not_given_to_others(names: set[str]) -> None:
    assert host(SLURMD_NODENAME="node7") == "lab1"
    names.clear()
    assert host(SLURMD_NODENAME="node7") == "10.9.8.7"


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", "127.0.1.1"])
def test_loopback_is_never_the_place_for_several_nodes(
    names: set[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    names.add(name)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert host() == "10.9.8.7"
    monkeypatch.setattr(rendezvous, "_routed_address", lambda: None)
    with pytest.raises(TopologyError, match=r"no name that resolves.*MASTER_ADDR, or interface"):
        host()


def test_a_suffix_that_makes_no_name_is_refused(names: set[str]) -> None:
    with pytest.raises(TopologyError, match=r"host_suffix 'x' makes 'lab1x'.*doesn't resolve.*correct host_suffix"):
        host(PHALANX_HOST_SUFFIX="x")


def test_the_derived_address_has_the_suffix_too() -> None:
    """Without a run directory all ranks compute it."""
    environ = step(3, "2") | {"SLURM_STEP_NODELIST": "jw[07-08]", "PHALANX_HOST_SUFFIX": "i"}
    assert Topology.from_environ(environ).master_addr == "jw07i"
    assert Topology.from_environ(environ | {"PHALANX_HOST_SUFFIX": ""}).master_addr == "jw07"


def _interfaces() -> list[tuple[str, str]]:
    """Names and IPv4 addresses, as iproute2 gives them."""
    try:
        shown = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [line.split() for line in shown.splitlines()]
    return [(row[1], row[3].partition("/")[0]) for row in rows if not row[3].startswith("127.")]


def test_an_interface_stands_for_its_address() -> None:
    found = _interfaces()
    if not found:
        pytest.skip("this host has no interface but loopback, or no iproute2 to compare with")
    name, address = found[0]
    assert interface_address(f"none0,{name}") == address


@pytest.mark.parametrize("name", ["ib77", "lo"])
def test_an_interface_without_an_address_for_others_is_named_with_those_there_are(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"interface '{name}' has no address.*there are .*lo.*set interface"):
        interface_address(name)


def test_a_global_ipv6_address_serves_where_there_is_no_ipv4(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    rows = [
        "fe80000000000000021a4afffe160001 02 40 20 80     ib0",
        "fd000000000000000000000000000004 02 40 00 80     ib0",
    ]
    table.write_text("\n".join(rows) + "\n")
    assert rendezvous._ipv6("ib0", table) == "fd00::4"
    assert rendezvous._ipv6("ib1", table) is None


def worker(script: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PHALANX", "OMPI"))}
    kept["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "phalanx.worker", str(script)]
    return subprocess.run(command, env=kept | environ, capture_output=True, text=True, timeout=60, check=False)


def test_a_worker_meets_before_the_script_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import json, os, socket
        from pathlib import Path
        (said,) = Path(os.environ["PHALANX_RUN_DIR"], "rendezvous").iterdir()
        said = json.loads(said.read_text())
        print([said["host"], str(said["port"])] == [os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]])
        try:
            socket.socket().bind(("", said["port"]))
        except OSError:
            print("kept")
        """)
    )
    assert worker(script, PHALANX_RUN_DIR=str(tmp_path), **step(0)).stdout == "True\nkept\n"
    script.write_text("import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")
    assert worker(script, PHALANX_RUN_DIR=str(tmp_path), MASTER_PORT="29611", **step(0)).stdout.split()[1] == "29611"
    derived = Topology.from_environ(step(0)).master_port
    assert worker(script, **step(0)).stdout.split()[1] == str(derived)
    place = json.loads((tmp_path / "rendezvous/70001.0.0.json").read_text())
    assert place.keys() == {"v", "host", "port", "time", "pid"}


def test_a_worker_makes_the_nodes_temporary_folders(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import tempfile; print(tempfile.gettempdir())")
    local = tmp_path / "local" / "job"
    caches = {"TRITON_CACHE_DIR": str(local / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(local / "inductor")}
    assert worker(script, TMPDIR=str(local), **caches).stdout == f"{local}\n"
    assert sorted(path.name for path in local.iterdir()) == ["inductor", "triton"]
    (tmp_path / "file").touch()
    done = worker(script, TMPDIR=str(tmp_path / "file" / "job"))
    assert done.returncode == 0
    assert f"cannot make {tmp_path}/file/job on host" in done.stderr
    assert "set tmpdir" in done.stderr
