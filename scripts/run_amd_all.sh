#!/bin/sh
# A training script on all AMD GPUs of this machine: scripts/run_amd_all.sh train.py --lr 0.1
# Flags of `samecurve run` stand before the script:
#   scripts/run_amd_all.sh --gpus 0,1 train.py
PYTHON=${PYTHON:-python3}
if [ $# -eq 0 ]; then
  echo "error: no script was given" >&2
  echo "  remedy: $0 SCRIPT [ARGS] starts a script of yours on all AMD GPUs, such as" \
    "examples/plain_ddp.py; the demo, without one: $PYTHON -m samecurve train -f models/tiny.yaml" >&2
  exit 2
fi
vendor=$("$PYTHON" -m samecurve.launch.script.placement) || exit 2
if [ "$vendor" != AMD ]; then
  hidden="HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES hide some"
  echo "error: no AMD GPU found (${vendor:-no GPU at all})" >&2
  echo "  remedy: rocm-smi lists those that the driver sees; $hidden;" \
    "\`samecurve run\` takes what there is" >&2
  exit 1
fi
exec "$PYTHON" -m samecurve run "$@"
