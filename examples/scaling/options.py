"""The options that all scripts of this folder share; config/*.yaml have their values."""

import os
import socket
import sys

from model import MODELS

import phalanx


def parse(description):
    """What the command line and its files say."""
    args = parser(description).parse_args()
    if args.verbose and phalanx.Topology.current().rank == 0:
        print(*(f"{name}: {value}" for name, value in vars(args).items()), sep="\n", flush=True)
    return args


def parser(description):
    made = phalanx.ArgumentParser(description=description)
    add = made.add_argument
    yes_or_no = {"type": bool, "nargs": "?", "const": True, "default": False}
    add("--data_dir", "--data-dir", default="images", help="<data_dir>/<class>/<image>.jpg")
    add("--synthetic", **yes_or_no, help="random images in place of data_dir")
    add("--subset_size", "--subset-size", type=int, help="images of an epoch; null in a file: all")
    add("--image_size", "--image-size", type=int, default=224, help="pixels along an edge")
    add("--model", choices=MODELS, default="resnet152")
    add("--batch_size", "--batch-size", type=int, default=64, help="images a process and step")
    add("--epochs", type=int, default=3)
    add("--lr", type=float, default=0.01, help="the same for any number of processes")
    add("--momentum", type=float, default=0.5)
    add("--shuff", **yes_or_no, help="another order in each epoch")
    add("--rnd_seed", "--rnd-seed", type=int, default=0)
    add("--nworker", type=int, default=0, help="processes that load images, for each training process")
    add("--prefetch", type=int, default=2, help="batches that each of them has ready")
    add("--log_int", "--log-int", type=int, default=20, help="steps between lines of output")
    add("--verbose", **yes_or_no, help="print all options at the start")
    add("--backend", help="nccl or gloo; null in a file: nccl on GPUs, else gloo")
    add("--fp16_allreduce", "--fp16-allreduce", **yes_or_no, help="Horovod: gradients travel as fp16")
    add("--use_adasum", "--use-adasum", **yes_or_no, help="Horovod: Adasum in place of the average")
    add("--gradient_predivide_factor", "--gradient-predivide-factor", type=float, default=1.0, help="Horovod")
    add("--zero_stage", "--zero-stage", type=int, choices=range(4), default=0, help="DeepSpeed: what is sharded")
    add(
        "--epoch_time_directory", "--epoch-time-directory", default="scalability-metrics",
        help="where scripts that were not started by phalanx leave their epoch times",
    )  # fmt: skip
    return made


def settings(args):
    """Those options that are settings of Phalanx; its own command line wins over them."""
    horovod = ("fp16_allreduce", "use_adasum", "gradient_predivide_factor")
    return {
        "seed": args.rnd_seed,
        "backend": args.backend,
        "horovod": {name: getattr(args, name) for name in horovod},
        "deepspeed": {"zero_stage": args.zero_stage},
    }


def one_process_unless_launched():
    """For scripts by hand: what a launcher tells each process, for one that nobody launched as one of several."""
    topology = phalanx.Topology.current()
    if topology.world_size == 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        for name, value in {**topology.environ(), **place}.items():
            os.environ.setdefault(name, value)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        sys.exit(
            f"this is process {topology.rank} of {topology.world_size} ({topology.source}), and {', '.join(missing)} "
            "not set: start the script by torchrun, by the engine's own launcher, or by phalanx run"
        )
