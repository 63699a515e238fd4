"""Settings of Slurm jobs: what is asked of Slurm, the site's facts, and what stands in the batch script."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from .convert import to_integer, to_text_list
from .sbatch import FLAGS, OPTIONALS, PASSED, REFUSED
from .section import NotNegative, Positive, Section, TextList
from .text import is_null
from .walltime import EXPECTED, seconds


def _option(name: str) -> tuple[Any, Any]:
    kind = bool | None if name in FLAGS else str | None
    return kind, Field(default=None, description=f"sbatch --{name.replace('_', '-')}")


class _Options(Section):
    @field_validator(*OPTIONALS, check_fields=False)
    @classmethod
    def _truth(cls, text: str | None) -> str | None:
        """`True` is no value for sbatch: such options then stand alone, or not at all."""
        return text.lower() if text and text.lower() in ("true", "false") else text


if TYPE_CHECKING:

    class SbatchSettings(_Options):
        open_mode: str | None = None
        gpus: str | None = None
        array: str | None = None
        dependency: str | None = None
else:
    SbatchSettings = create_model(
        "SbatchSettings", __base__=_Options, **{name: _option(name) for name in sorted(PASSED)}
    )


class ModulesSettings(Section):
    """Environment modules; the order in which the keys are written is the order of the commands."""

    purge: bool | Literal["force"] = Field(default=False, description="module purge first: true, false or force")
    use: TextList = Field(default=(), description="folders for `module use`")
    load: TextList = Field(default=(), description="modules to load, in this order")
    unload: TextList = Field(default=(), description="modules to unload")
    _order: tuple[str, ...] = PrivateAttr(default=("purge", "use", "load", "unload"))

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, data: Any, handler: ModelWrapValidatorHandler[ModulesSettings]) -> ModulesSettings:
        made = handler(data)
        if isinstance(data, dict):
            made._order = tuple(dict.fromkeys((*data, *made._order)))
        return made

    @model_serializer(mode="wrap")
    def _in_order(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Settings that are written and read again keep the order too."""
        plain = handler(self)
        return {name: plain[name] for name in self._order if name in plain}

    @property
    def steps(self) -> list[tuple[str, tuple[str, ...]]]:
        """Verbs and their words, in order; those without words are left out, but for `purge`."""
        found: list[tuple[str, tuple[str, ...]]] = []
        for verb in self._order:
            value = getattr(self, verb)
            if verb == "purge" and value:
                found.append((verb, ("force",) if value == "force" else ()))
            elif verb != "purge" and value:
                found.append((verb, value))
        return found


class ProxySettings(Section):
    http: str | None = Field(default=None, description="http_proxy in jobs")
    https: str | None = Field(default=None, description="https_proxy in jobs")
    no: str | None = Field(default=None, description="no_proxy in jobs")


class TorchrunSettings(Section):
    executable: str | None = Field(default=None, description="the site's torchrun; unset: torch's own module")
    start: Literal["srun", "mpirun"] = Field(default="srun", description="what starts an agent on each node")


class MpirunSettings(Section):
    executable: str = Field(default="mpirun", description="MPI's starter")
    flavor: Literal["auto", "openmpi", "mpich"] = Field(default="auto", description="whose options it takes")
    args: TextList = Field(default=(), description="more options for it")


class SlurmSettings(Section):
    """Names are sbatch's own where it has one."""

    job_name: str | None = Field(default=None, description="name of the Slurm job; unset: the run's name")
    nodes: Positive = Field(default=1, description="number of nodes")
    ntasks: Positive | None = Field(default=None, description="Slurm tasks in all; unset: nodes x ntasks_per_node")
    ntasks_per_node: Positive = Field(default=1, description="Slurm tasks per node")
    gpus_per_node: NotNegative | None = Field(default=None, description="GPUs per node; unset: all there are")
    gpus_per_task: Positive | None = Field(default=None, description="GPUs per Slurm task")
    gres: str | None = Field(default=None, description="generic resources, such as gpu:a100:4")
    gpu_request: Literal["gpus-per-node", "gres", "gpus-per-task"] = Field(
        default="gpus-per-node", description="how this site wants GPUs to be asked for"
    )
    gpu_type: str | None = Field(default=None, description="type of GPU to ask for, such as a100")
    cpus_per_task: Positive | None = Field(default=None, description="CPUs per Slurm task; unset: what is there")
    cpus_per_gpu: Positive | None = Field(default=None, description="CPUs per GPU, instead of cpus_per_task")
    mem: str | None = Field(default=None, description="memory per node, such as 64G")
    mem_per_cpu: str | None = Field(default=None, description="memory per CPU, instead of mem")
    mem_per_gpu: str | None = Field(default=None, description="memory per GPU, instead of mem")
    time: str | None = Field(default=None, description="time limit: minutes, HH:MM:SS, D-HH and so on")
    partition: str | None = Field(default=None, description="partition")
    account: str | None = Field(default=None, description="account that is charged")
    output: str | None = Field(default=None, description="file for the job's output; unset: in the run directory")
    error: str | None = Field(default=None, description="file for its errors; unset: with the output")
    chdir: str | None = Field(default=None, description="folder of the job; unset: where it is submitted")
    sbatch: SbatchSettings = Field(default=SbatchSettings(), description="any other option of sbatch, by its name")
    sbatch_args: TextList = Field(default=(), description="options of site plugins, as words: --name=value")

    modules: ModulesSettings = Field(default=ModulesSettings(), description="environment modules")
    proxy: ProxySettings = Field(default=ProxySettings(), description="proxies of the compute nodes")
    tmpdir: str | None = Field(default=None, description="node-local folder for temporary files and caches")
    interface: str | None = Field(default=None, description="network interface for NCCL, gloo and the rendezvous")
    host_suffix: str = Field(default="", description="what host names get on the fast network, such as i")
    cpu_bind: str | None = Field(default=None, description="srun --cpu-bind; unset: none for one agent per node")
    mpi: str | None = Field(default=None, description="srun --mpi, such as pmix")
    srun_args: TextList = Field(default=(), description="more options for srun")
    torchrun: TorchrunSettings = Field(default=TorchrunSettings(), description="launcher torchrun")
    mpirun: MpirunSettings = Field(default=MpirunSettings(), description="launcher mpirun")
    shebang: str = Field(default="/bin/bash", description="interpreter of batch scripts, after #!")
    sacct: Literal["auto", "true", "false"] = Field(default="auto", description="whether sacct works here")

    before: str | None = Field(default=None, description="shell lines after the modules, before the environment")
    after: str | None = Field(default=None, description="shell lines after the training; can't change the exit code")
    pre_exec_file: str | None = Field(default=None, description="file of shell lines that stand after `before`")
    exec_command: str | None = Field(default=None, description="shell lines instead of the launch")
    exec_file: str | None = Field(default=None, description="file of shell lines instead of the launch")
    training_cmd: str | None = Field(
        default=None, description="what to run if no SCRIPT is given: shell text; {key} is a setting's value"
    )

    mode: Literal["single", "runall", "scaling-test"] = Field(
        default="single", description="one job, one per strategy, or one per strategy and number of nodes"
    )
    strategies: TextList = Field(default=(), description="strategies of a series; unset: ddp, horovod and deepspeed")
    scalability_nodes: tuple[int, ...] = Field(default=(1, 2, 4, 8), description="numbers of nodes of a scaling-test")
    scalability_nproc: tuple[int, ...] | None = Field(
        default=None,
        description="numbers of processes of a scaling-test on this machine; unset: 1, 2, 4, … up to its GPUs or CPUs",
    )
    repeats: Positive = Field(default=1, description="how often each member of a series is run")
    scaling: Literal["strong", "weak"] = Field(
        default="strong",
        description="recorded for the report: strong, one workload for all sizes; weak, it grows with them",
    )
    save_script: bool = Field(default=True, description="submit: keep the script in save_dir")
    submit_job: bool = Field(default=True, description="submit: hand the script to sbatch")
    save_dir: str = Field(default="slurm-scripts", description="folder for saved scripts")
    snapshot: bool = Field(default=False, description="run a copy of the tracked files, made at submission")

    # Defaults are itwinai's: its files may leave them out.
    config_name: str = Field(default="config", description="for {config_name} in training_cmd")
    config_path: str = Field(default=".", description="for {config_path} in training_cmd")
    config_file: str | None = Field(default=None, description="for {config_file} in training_cmd")
    pipe_key: str = Field(default="training_pipeline", description="for {pipe_key} in training_cmd")
    exp_name: str | None = Field(default=None, description="for {experiment_name} in training_cmd")
    use_ray: bool | None = Field(default=None, description="of itwinai: true is launcher ray")
    py_spy: bool | None = Field(default=None, description="of itwinai: without effect")
    profiling_sampling_rate: str | None = Field(default=None, description="of itwinai: without effect")
    itwinai_trainer: bool | None = Field(
        default=None, description="of itwinai: for a slurm.py of one's own, as in examples/scaling"
    )
    debug: bool | None = Field(default=None, description="of itwinai: without effect")

    @model_validator(mode="before")
    @classmethod
    def _typed_gpus(cls, data: Any) -> Any:
        """`gpus_per_node: a100:4`, as sbatch has it, is a number and a type; several types are a gres."""
        text = str(data.get("gpus_per_node") or "") if isinstance(data, dict) else ""
        if re.fullmatch(r"[^:,\s]+:\d+(,[^:,\s]+:\d+)+", text) and data.get("gres") is None:
            return {**data, "gpus_per_node": None, "gres": ",".join(f"gpu:{kind}" for kind in text.split(","))}
        for name in ("gpus_per_node", "gpus_per_task") if isinstance(data, dict) else ():
            kind, colon, count = str(data.get(name) or "").rpartition(":")
            if colon and kind and ":" not in kind and count.isdecimal():
                data = {"gpu_type": kind, **data, name: int(count)}
        return data

    @field_validator("before", "after", "exec_command", "training_cmd", mode="before")
    @classmethod
    def _lines(cls, value: Any) -> Any:
        """A list of lines is the same as the lines."""
        return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    @field_validator("scalability_nodes", "scalability_nproc", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        nproc = info.field_name == "scalability_nproc"
        if nproc and (value is None or is_null(value)):
            return None
        found = tuple(to_integer(item) for item in to_text_list(value)) if not is_null(value) else ()
        if not found or any(not isinstance(item, int) or item < 1 for item in found):
            raise ValueError(f"expected numbers of {'processes' if nproc else 'nodes'} from 1, such as 1, 2, 4")
        return found

    @field_validator("time")
    @classmethod
    def _time(cls, text: str | None) -> str | None:
        if text is not None:
            try:
                seconds(text)
            except ValueError:
                raise ValueError(f"expected {EXPECTED}") from None
        return text

    @field_validator("shebang")
    @classmethod
    def _bash(cls, text: str) -> str:
        if not text.removeprefix("#!").strip().startswith("/") or "bash" not in text:
            raise ValueError(f"shebang={text!r}: batch scripts are bash; expected such as '/bin/bash -l'")
        return text

    @field_validator("sbatch_args", "srun_args")
    @classmethod
    def _options(cls, words: TextList, info: ValidationInfo) -> TextList:
        dashes = "--" if info.field_name == "sbatch_args" else "-"  # in a script, an option is one word
        for word in words:
            if not word.startswith(dashes):
                raise ValueError(f"{word!r}: expected words such as --name=value")
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            if dashes == "--" and name in _DECIDED:
                raise ValueError(f"{word!r} would contradict what is decided by the setting {name}: use that")
            if dashes == "--" and name in REFUSED:
                raise ValueError(f"{word!r}: {REFUSED[name]}")
        return words


# Of sbatch's options those that sizes, names and files of a job follow from; the last of two counts for Slurm.
_DECIDED = (
    "nodes", "ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "gpus", "gpus_per_node", "gpus_per_task",
    "gres", "mem", "mem_per_cpu", "mem_per_gpu", "job_name", "output", "error", "open_mode", "chdir", "array", "export",
    "time", "dependency", "requeue", "no_requeue",
)  # fmt: skip
WITHOUT_EFFECT = ("py_spy", "profiling_sampling_rate", "debug")
