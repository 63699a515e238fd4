"""Jobs of this folder: the script with Phalanx, the scripts by hand, or both.

    python slurm.py -c slurm_config.yaml --mode scaling-test --preview true

Any setting of Phalanx is an option, as for `phalanx submit`; `--trainer` (or `itwinai_trainer` in the file) chooses.
"""

from phalanx.slurm import SlurmScriptBuilder, slurm_parser

SCRIPTS = {"phalanx": "train.py", "baseline": "{strategy}_trainer.py"}
OPTIONS = "-c config/base.yaml -c config/{strategy}.yaml"


def chosen(args, config):
    """Which scripts: as the option says, else the file; runall is for comparing, so that it means both."""
    if args.trainer is not None:
        return list(SCRIPTS) if args.trainer == "both" else [args.trainer]
    if config.mode == "runall":
        return list(SCRIPTS)
    return ["baseline" if config.itwinai_trainer is False else "phalanx"]


def main():
    parser = slurm_parser(description=__doc__)
    parser.add_argument("--trainer", choices=[*SCRIPTS, "both"], help="default: as itwinai_trainer says")
    parser.add_argument("--options", default="", help="more options for the scripts, such as '--model tiny'")
    args = parser.parse_args()
    config = SlurmScriptBuilder(args, training_cmd=SCRIPTS["phalanx"]).jobs()[0].loaded.config
    for trainer in chosen(args, config):
        name = config.job_name if trainer == "phalanx" else f"{config.job_name}-baseline"
        command = f"{SCRIPTS[trainer]} {OPTIONS} {args.options}".strip()
        ids = SlurmScriptBuilder(args, training_cmd=command, job_name=name).run()
        print(*ids, sep="\n")


if __name__ == "__main__":
    main()
