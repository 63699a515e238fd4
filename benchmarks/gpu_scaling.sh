#!/bin/bash
# The scaling tutorial on this machine's GPUs, as in docs/performance.md: train.py and the scripts by hand, in turns.
#
#     PYTHONPATH=src bash benchmarks/gpu_scaling.sh OUT [GPUS…]
#
# Leaves runs and the all-reduce benchmark in OUT/runs; then: phalanx report OUT/runs --out OUT/report
set -u
out=$(realpath -m "$1"); shift
sizes=("${@:-1}")
model=${MODEL:-resnet152} batch=${BATCH:-64} images=${IMAGES:-3840} epochs=${EPOCHS:-4} repeats=${REPEATS:-2}
mkdir -p "$out"
cd "$(dirname "$0")/../examples/scaling" || exit
options=(-c config/base.yaml --synthetic true --model "$model" --batch-size "$batch" --subset-size "$images"
  --image-size "${PIXELS:-224}" --epochs "$epochs" --nworker "${WORKERS:-4}" --log-int 1000)
start() { timeout 150 "${PYTHON:-python3}" -m phalanx run --local --run-root "$out/runs" --no-progress "$@"; }

largest=1
for gpus in "${sizes[@]}"; do ((gpus > largest)) && largest=$gpus; done
for repeat in $(seq "$repeats"); do
  for gpus in "${sizes[@]}"; do
    for strategy in ${STRATEGIES:-ddp}; do
      echo "=== repeat $repeat: $strategy on $gpus"
      start --nproc "$gpus" -s "$strategy" --name "$strategy-$gpus" measure.profile_steps="${WINDOW:-5}" train.py "${options[@]}"
      start --nproc "$gpus" -s "$strategy" --name "$strategy-$gpus-by-hand" "${strategy}_trainer.py" "${options[@]}"
    done
  done
done
((largest > 1)) && start --nproc "$largest" --name allreduce ../../src/phalanx/run/allreduce.py 256
exit 0
