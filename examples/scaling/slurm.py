"""Jobs of this folder: the script with Phalanx, the scripts by hand, or both.

    python slurm.py -c slurm_config.yaml --mode scaling-test

Any setting of Phalanx is an option, as for `phalanx submit`; --trainer (in the file itwinai_trainer) names the script.
"""

import sys

from phalanx.errors import PhalanxError
from phalanx.slurm import SlurmScriptBuilder, slurm_parser

SCRIPTS = {"phalanx": "train.py", "baseline": "{strategy}_trainer.py"}
NAME = ("-J", "--job-name", "--job_name")  # typed, it stays as it is for one script's jobs
CONFIG = "-c config/base.yaml -c config/{strategy}.yaml"  # {strategy} is each job's


def chosen(trainer, settings):
    """Which scripts: as the option says, else the file; runall is there to compare, so that it means both."""
    if trainer is not None:
        return list(SCRIPTS) if trainer == "both" else [trainer]
    if settings.mode == "runall":
        return list(SCRIPTS)
    return ["baseline" if settings.itwinai_trainer is False else "phalanx"]


def main():
    parser = slurm_parser(description=__doc__)
    parser.add_argument("--trainer", choices=[*SCRIPTS, "both"], help="default: as itwinai_trainer says")
    args = parser.parse_args()
    settings = SlurmScriptBuilder(args).settings
    trainers = chosen(args.trainer, settings)
    as_typed = len(trainers) == 1 and any(word.startswith(NAME) for word in sys.argv[1:])
    for trainer in trainers:
        name = settings.job_name if as_typed else f"{settings.job_name or 'scaling'}-{trainer}"
        own = {"job_name": name, "training_cmd": f"{SCRIPTS[trainer]} {CONFIG}"}
        if settings.strategy == "auto":  # the scripts by hand need a name
            own["strategy"] = "ddp"
        for job in SlurmScriptBuilder(args, override=own).run():
            print(job)


if __name__ == "__main__":
    try:
        main()
    except PhalanxError as error:
        sys.exit(f"slurm.py: {error}")
