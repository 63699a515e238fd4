"""Which interface ranks talk by where a host's own name is a loopback address, as Debian's default is."""

import shutil
import socket
import subprocess

import pytest

from phalanx.errors import PlanError
from phalanx.rank import horovod_ranks, network
from phalanx.rank.topology import Topology

TWO_NODES = Topology(0, 2, 0, 1, 0, 2, "node1", 20000, "slurm")
ONE_NODE = Topology(0, 2, 0, 2, 0, 1, "127.0.0.1", 20000, "slurm")
OUTSIDE = "192.0.2.7"  # of the range for documentation


def route() -> tuple[str, str]:
    """The device and the address that the kernel would take to it."""
    if shutil.which("ip") is None:
        pytest.skip("no ip (iproute2), which knows the routes")
    words = subprocess.run(["ip", "-4", "route", "get", OUTSIDE], capture_output=True, text=True, check=False)
    found = words.stdout.split()
    if "dev" not in found or "lo" in found:
        pytest.skip("this machine has no route to others")
    return found[found.index("dev") + 1], found[found.index("src") + 1]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Addresses of names, as /etc/hosts might have them; this host is node1."""
    known = {"node1": "127.0.1.1"}
    real = socket.getaddrinfo

    def look_up(host: str, *more: object, **options: object) -> object:
        if host not in known and not host[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return real(known.get(host, host), *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_the_interface_is_the_one_towards_another_node(names: dict[str, str]) -> None:
    device, _ = route()
    names["node2"] = OUTSIDE
    said = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), device)
    assert network.variables(TWO_NODES, {"SLURM_JOB_NODELIST": "node[1-2]"}) == said
    assert network.variables(TWO_NODES, {}) == said  # only the master is known, and it is this host


def test_a_name_that_others_can_use_is_left_to_the_libraries(names: dict[str, str]) -> None:
    _, names["node1"] = route()
    assert network.variables(TWO_NODES, {}) == {}


def test_an_address_that_is_not_this_hosts_tells_nothing(names: dict[str, str]) -> None:
    device, _ = route()
    names["node1"] = OUTSIDE
    assert network.variables(TWO_NODES, {})["GLOO_SOCKET_IFNAME"] == device


@pytest.mark.parametrize("environ", [{"GLOO_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "=eth1"}])
def test_what_somebody_chose_stays_and_one_node_needs_nothing(names: dict[str, str], environ: dict[str, str]) -> None:
    assert network.variables(TWO_NODES, environ) == {}
    assert network.variables(ONE_NODE, {}) == {}


def test_horovods_gloo_which_heeds_no_interface_is_refused(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(horovod_ranks, "built_with", lambda: frozenset({"gloo"}))
    monkeypatch.setattr(horovod_ranks, "controller", lambda *_: "gloo")
    with pytest.raises(PlanError, match=r"node1 is a loopback one .* /etc/hosts"):
        horovod_ranks.provide(TWO_NODES, {}, tmp_path)
