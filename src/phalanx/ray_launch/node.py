"""One Ray node, as `ray start` is told of it: everything of its own, so that jobs on one host don't meet."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import PlanError
from ..planning.facts import usable_gpus
from ..rank.cpus import usable_cpus

RANKS = "phalanx_rank"  # Ray's resource of which a node has one for each of its ranks
SOCKET = "PHALANX_RAY_SOCKET"  # where a Ray worker finds its node's agent

# Ray's daemons, with their options; Ray's workers take ports that the kernel gives, which are nobody else's.
_OPTIONS = {
    "node_manager": "--node-manager-port",
    "object_manager": "--object-manager-port",
    "agent_http": "--dashboard-agent-listen-port",
    "agent_grpc": "--dashboard-agent-grpc-port",
    "runtime_env": "--runtime-env-agent-port",
    "metrics": "--metrics-export-port",
}
_HEAD_OPTIONS = {"gcs": "--port", "dashboard": "--dashboard-port"}
PORTS = ("agent", *_HEAD_OPTIONS, "client", *_OPTIONS)  # the first is our own agent's

# A Unix socket's path has at most 107 bytes, of which Ray takes these.
_LONGEST = 107 - len("/session_2026-01-31_23-59-59_123456_1234567/sockets/plasma_store")
_RANDOM = 8  # letters that mkdtemp adds


@dataclass(frozen=True)
class Node:
    """`index` counts the nodes of the launch; `ports` has a number for each of `PORTS`; memory in MiB."""

    index: int
    address: str
    ports: Mapping[str, int]
    cpus: int
    gpus: int
    ranks: int
    memory: int
    temp: Path

    def start(self, head: str | None = None) -> list[str]:
        """The `ray start` of this node: the head's own, or one that joins the head at `head`."""
        if head is None:
            place = ["--head", "--include-dashboard=false", "--no-monitor", *self._ports(_HEAD_OPTIONS)]
            if find_spec("grpc") is not None:  # without it Ray has no client server, and no such option
                place.append(f"--ray-client-server-port={self.ports['client']}")
        else:
            place = [f"--address={head}"]
        return [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *place, "--block"),
            *(f"--node-ip-address={self.address}", *self._ports(_OPTIONS)),
            *("--min-worker-port=0", "--max-worker-port=0"),
            *(f"--num-cpus={self.cpus}", f"--num-gpus={self.gpus}"),
            f"--resources={json.dumps({RANKS: self.ranks, joined(self.index): 1})}",
            f"--object-store-memory={self.memory << 20}",
            *(f"--temp-dir={self.temp}", "--include-log-monitor=false", "--log-style=record", "--log-color=false"),
        ]

    def _ports(self, options: Mapping[str, str]) -> list[str]:
        return [f"{option}={self.ports[name]}" for name, option in options.items()]

    def environment(self, environ: Mapping[str, str], token: str, start_timeout: int) -> dict[str, str]:
        """What Ray's processes get: a cluster that only the job's own processes may use, and no word to the outside."""
        own = {name: text for name, text in environ.items() if name != "RAY_ADDRESS"}  # of another cluster
        return {
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon it sees that a rank has ended
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(start_timeout),
            "RAY_agent_register_timeout_ms": str(1000 * start_timeout),  # its own limits are short for a busy machine,
            "RAY_worker_register_timeout_seconds": str(start_timeout),  # or a slow file system
            "RAY_raylet_start_wait_time_s": str(start_timeout),
            "RAY_num_workers_soft_limit": str(self.ranks + 4),  # it starts a process for each CPU; most are idle
            "RAY_memory_monitor_refresh_ms": "0",  # memory is Slurm's to watch: Ray would count other jobs' too
            **own,
            **access(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.temp),
            "RAY_kill_child_processes_on_worker_exit": "false",  # ranks get time to end, see `begin.py` and `ranks.py`
            "RAY_TRAIN_V2_ENABLED": "1",
            "RAY_TRAIN_METRICS_ENABLED": "0",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # of clouds
            "RAY_CHDIR_TO_TRIAL_DIR": "0",
            SOCKET: str(self.temp / "agent"),
        }


def access(token: str) -> dict[str, str]:
    """With these a process may use the cluster; without, anybody who reaches its ports might run code in it."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def joined(index: int) -> str:
    """The resource by which a node is told from the others."""
    return f"phalanx_node_{index}"


def cpus(asked: int | None, environ: Mapping[str, str]) -> int:
    """What was planned, else what Slurm gave to this node's task, else what this process may use."""
    for text in (environ.get("SLURM_CPUS_PER_TASK"), environ.get("SLURM_CPUS_ON_NODE")):
        if asked is None and text and text.isdecimal() and int(text):
            asked = int(text)
    return asked or usable_cpus()


def gpus(asked: int | None, environ: Mapping[str, str]) -> int:
    return usable_gpus(environ) if asked is None else asked


def temp_folder(setting: str | None, job: str, environ: Mapping[str, str]) -> Path:
    """A new folder on this node, with the job's name if that fits; Ray's sockets in it need a short path.

    Raises PlanError if it can't be made, or the user's is too long.
    """
    base, prefix = setting or environ.get("TMPDIR") or "/tmp", f"ray-{job}-"
    prefix = prefix if _fits(base, prefix) else "r-"
    if not _fits(base, prefix):
        if setting:
            raise PlanError(
                f"ray.temp_dir={setting!r} has {len(os.fsencode(base))} letters, and the paths of Ray's sockets in it "
                f"would be too long for Unix: expected at most {_LONGEST - _RANDOM - len('/r-')}"
            )
        base, prefix = "/tmp", f"ray-{job}-"[:20]
    try:
        Path(base).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError as error:
        raise PlanError(f"cannot make a folder for Ray in {base}: {error.strerror}; set ray.temp_dir") from None


def _fits(base: str, prefix: str) -> bool:
    return len(os.fsencode(base)) + 1 + len(prefix) + _RANDOM <= _LONGEST


def named(block: Sequence[int]) -> dict[str, int]:
    return dict(zip(PORTS, block, strict=True))
