"""The settings, one typed field each; a field's description is what help, schema and docs show.

Every scalar of a file or a command line arrives as text and the field's type converts it, so that `1e-3`
is a float for a float field and `0123` stays `0123` for a text field.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from ..errors import did_you_mean
from ..registry import LAUNCHERS, STRATEGIES, TRACKERS
from .container_schema import ContainerSettings
from .convert import to_integer
from .engines_schema import DeepspeedSettings, HorovodSettings
from .measure_schema import MeasureSettings
from .ray_schema import RaySettings
from .section import NotNegative, Positive, Precision, Section, TextList
from .slurm_schema import SlurmSettings


class CheckpointSettings(Section):
    every_steps: Positive | None = Field(default=None, description="steps between checkpoints; unset: only run.save()")
    keep: Positive = Field(default=3, description="how many of the newest checkpoints to keep")
    monitor: str | None = Field(default=None, description="logged value by which the best checkpoints are kept too")
    mode: Literal["min", "max"] = Field(default="min", description="whether the monitored value is best low or high")
    keep_best: NotNegative = Field(default=1, description="how many of the best to keep, with checkpoint.monitor")


class DdpSettings(Section):
    find_unused_parameters: bool = Field(default=False, description="DDP: look for unused parameters each step")
    static_graph: bool = Field(default=False, description="DDP: promise that the graph never changes")
    broadcast_buffers: bool = Field(default=True, description="DDP: rank 0's buffers to all at each forward")
    bucket_cap_mb: Positive = Field(default=25, description="DDP: gradient bucket size in MiB")
    sync_batchnorm: bool = Field(
        default=False, description="BatchNorm over the batches of all ranks, under any strategy (CUDA only)"
    )


class FsdpSettings(Section):
    replicate: Positive = Field(default=1, description="HSDP: replicas, each over world size / replicate ranks")
    reshard_after_forward: bool = Field(default=True, description="FSDP: free gathered parameters after the forward")
    wrap: TextList = Field(
        default=("auto",),
        description="FSDP: what to shard as a unit: auto (items of ModuleLists), none (the whole model), "
        "size:N (modules of at least N parameters), or class names",
    )
    param_dtype: Precision = Field(default="fp32", description="FSDP: type of gathered parameters; bf16 halves traffic")
    reduce_dtype: Precision = Field(default="fp32", description="FSDP: type of gradient reduction")
    find_unused_parameters: bool = Field(
        default=False, description="FSDP: some ranks' batches may not reach all parameters (torch 2.13)"
    )


class LrScalingSettings(Section):
    rule: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="learning rate times 1, world size or its square root"
    )
    warmup_steps: NotNegative = Field(default=0, description="steps in which the factor grows from 1")


class JobConfig(SlurmSettings):
    """All settings of a run. Names are Slurm's own where Slurm has one."""

    name: str | None = Field(default=None, description="run name; unset: the script's name")
    run_root: str = Field(default="runs", description="folder that holds the run directories")
    run_mode: str = Field(
        default="0700", description="who may look into a run directory, as for chmod: 0750 lets its group read it"
    )
    resume: str | None = Field(default=None, description="run to go on with: a path, a run id, or 'latest'")

    strategy: str = Field(default="auto", description="auto, " + ", ".join(STRATEGIES))
    launcher: str = Field(default="auto", description="auto, " + ", ".join(LAUNCHERS))
    nproc_per_node: Positive | Literal["auto", "gpu", "cpu"] | None = Field(
        default=None,
        description="ranks per node: a number, auto, gpu or cpu; "
        "unset: ntasks_per_node > 1, else gpus_per_node, else 1",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="where tensors live")
    backend: str | None = Field(default=None, description="communication; unset: nccl on cuda, gloo on cpu")
    master_addr: str | None = Field(default=None, description="rendezvous host; unset: the first node")
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="rendezvous port; unset: a free one"
    )

    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=0, description="seed of all random numbers")
    precision: Precision = Field(default="fp32", description="type of the forward: autocast over fp32 weights")
    accumulate: Positive = Field(default=1, description="batches per optimizer step")
    max_steps: Positive | None = Field(
        default=None, description="optimizer steps after which training ends, wherever it is in an epoch"
    )
    global_batch: Positive | None = Field(
        default=None, description="samples per optimizer step over all ranks; batches per rank and accumulate follow"
    )
    num_workers: NotNegative | Literal["auto"] | None = Field(
        default=None,
        description="loader workers per rank: a number or auto (from CPUs per rank); unset: the loader's own",
    )
    dry_run: bool = Field(
        default=False, description="one group of each loop, one evaluation batch and one checkpoint, then the end"
    )
    lr_scaling: LrScalingSettings = Field(default=LrScalingSettings(), description="learning rate by world size")
    checkpoint: CheckpointSettings = Field(default=CheckpointSettings(), description="checkpoints")
    ddp: DdpSettings = Field(default=DdpSettings(), description="strategy ddp")
    fsdp: FsdpSettings = Field(default=FsdpSettings(), description="strategy fsdp")
    deepspeed: DeepspeedSettings = Field(default=DeepspeedSettings(), description="strategy deepspeed")
    horovod: HorovodSettings = Field(default=HorovodSettings(), description="strategy horovod")
    ray: RaySettings = Field(default=RaySettings(), description="launcher ray")

    venv: str | None = Field(default=None, description="virtual environment of the ranks; unset: the command's own")
    runtime: Literal["auto", "venv", "none", "apptainer", "singularity"] = Field(
        default="auto", description="where ranks run: venv (also: none) or a container; auto: container.image, if any"
    )
    container: ContainerSettings = Field(default=ContainerSettings(), description="image of the ranks")
    conda: str | None = Field(default=None, description="conda environment of the ranks: its name or its folder")
    python: str | None = Field(default=None, description="interpreter of the ranks; unset: the virtual environment's")
    env: dict[str, str] = Field(default={}, description="environment variables for the ranks")
    trackers: TextList = Field(default=(), description="copies of the metrics: " + ", ".join(TRACKERS))
    records: Literal["auto", "rank", "node", "main"] = Field(
        default="auto",
        description="who writes step records: every rank, one per node, or rank 0; "
        "auto: rank up to 64 ranks, then main",
    )
    measure: MeasureSettings = Field(default=MeasureSettings(), description="what is measured beside the training")
    progress: bool = Field(default=True, description="progress bar on the main rank")
    params: dict[str, Any] = Field(default={}, description="the script's own settings: run.config.params")

    @field_validator("strategy", "launcher")
    @classmethod
    def _known_name(cls, name: str, info: ValidationInfo) -> str:
        table = STRATEGIES if info.field_name == "strategy" else LAUNCHERS
        return _known(("auto", *table), name)

    @field_validator("run_mode")
    @classmethod
    def _mode(cls, text: str) -> str:
        if not re.fullmatch(r"0?[0-2]?7[0-7]{2}", text):
            raise ValueError("expected a mode as chmod takes it, with all for you: 0700, 0750, 0770, 2770, 0755")
        return text

    _gave_way: dict[str, tuple[str, Any]] = PrivateAttr(default={})

    @property
    def gave_way(self) -> dict[str, tuple[str, Any]]:
        """What a lower layer had set and a share of each GPU replaced: by key, the share's key and the value."""
        return self._gave_way

    def remembering(self, gave_way: dict[str, tuple[str, str]]) -> JobConfig:
        """A copy that knows what gave way."""
        copy = self.model_copy()
        numbers = {key: (share, to_integer(text)) for key, (share, text) in gave_way.items() if key == "cpus_per_task"}
        copy._gave_way = {**gave_way, **numbers}
        return copy

    @property
    def run_permissions(self) -> int:
        """`run_mode` as a number."""
        return int(self.run_mode, 8)

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_known(TRACKERS, name) for name in names)


def _known(table: Collection[str], name: str) -> str:
    if name not in table:  # pydantic collects ValueErrors, so that all faults are reported together
        raise ValueError(f"expected one of {', '.join(table)}.{did_you_mean(name, table)}")
    return name
