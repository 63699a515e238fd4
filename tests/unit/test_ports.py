"""A job's ports: derived alike by all ranks, never ephemeral, and kept by one process at a time."""

from __future__ import annotations

import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from phalanx.rank import ports
from phalanx.rank.ports import claim, ephemeral_ports, job_ports

LINUX = range(32768, 61000)


def test_neighbouring_jobs_and_steps_begin_elsewhere() -> None:
    first = [next(job_ports(70000 + job, step, LINUX)) for job in range(20) for step in range(20)]
    assert len(set(first)) == 400


def test_the_sequence_tries_each_port_once() -> None:
    all_of_them = list(job_ports(70001, 3, LINUX))
    assert sorted(all_of_them) == list(range(20000, 32000))
    assert all_of_them == list(job_ports(70001, 3, LINUX))


@pytest.mark.parametrize(
    "ephemeral", [LINUX, range(10000, 65536), range(15000, 61001), range(25000, 61000), range(20010, 65001)]
)
def test_no_port_is_one_that_the_kernel_hands_out(ephemeral: range) -> None:
    some = list(islice(job_ports(70001, 0, ephemeral), 2000))
    assert len(some) > 500
    assert not set(some) & set(ephemeral)
    assert min(some) >= 1024


def test_where_every_port_is_ephemeral_any_will_do() -> None:
    assert 1024 <= next(job_ports(70001, 0, range(1024, 65536))) < 65536


def test_the_range_is_this_hosts_own(tmp_path: Path) -> None:
    setting = tmp_path / "ip_local_port_range"
    setting.write_text("15000\t61000\n")
    assert ephemeral_ports(setting) == range(15000, 61001)
    for text in ("", "many\n"):
        setting.write_text(text)
        assert ephemeral_ports(setting) == LINUX
    assert ephemeral_ports(tmp_path / "none") == LINUX


def bind_elsewhere(port: int) -> bool:
    """Whether another process can bind the port without asking to share it."""
    code = "import socket, sys; socket.socket().bind(('', int(sys.argv[1])))"
    return subprocess.run([sys.executable, "-c", code, str(port)], capture_output=True, check=False).returncode == 0


def test_a_claimed_port_is_refused_to_others_until_it_is_given_up() -> None:
    held = claim(job_ports(70001))
    assert held is not None
    port = held.getsockname()[1]
    assert not bind_elsewhere(port)
    again = claim(job_ports(70001))
    assert again is not None
    assert again.getsockname()[1] != port
    again.close()
    held.close()
    assert bind_elsewhere(port)


def test_the_owner_may_listen_beside_its_claim_and_still_nobody_else_gets_it() -> None:
    """As torch's store does, with SO_REUSEADDR."""
    held = claim(job_ports(70002))
    assert held is not None
    port = held.getsockname()[1]
    with held, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen()
        assert not bind_elsewhere(port)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    assert claim([]) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_by_others_is_passed_over(address: str) -> None:
    first, second = islice(job_ports(70003), 2)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((address, first))
        other.listen()
        held = claim([first, second])
        assert held is not None
        with held:
            assert held.getsockname()[1] == second


def test_a_host_without_ipv6_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ports._bound

    def only_ipv4(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(99, "Cannot assign requested address")
        return real(family, address, port)

    monkeypatch.setattr(ports, "_bound", only_ipv4)
    held = claim(job_ports(70004))
    assert held is not None
    with held:
        assert held.family == socket.AF_INET
        assert not bind_elsewhere(held.getsockname()[1])
