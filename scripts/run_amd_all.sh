#!/bin/sh
# All AMD GPUs of this machine. Without a script: every strategy for the models of the suite,
# a JSON file for each and one table, in bench/suite-amd; started again, it goes on where it was.
#   scripts/run_amd_all.sh
#   scripts/run_amd_all.sh --gpus 0,1,2,3
# With a script of yours, that one; flags of `samecurve run` stand before it:
#   scripts/run_amd_all.sh --gpus 0,1 train.py --lr 0.1
PYTHON=${PYTHON:-python3}
if ! "$PYTHON" -P -c 'import importlib.util as u; exit(not u.find_spec("samecurve"))'; then
  echo "error: samecurve is not installed for $PYTHON" >&2
  echo "  remedy: activate its environment, or PYTHON=.venv/bin/python $0 $*" >&2
  exit 2
fi
vendor=$("$PYTHON" -P -m samecurve.launch.script.placement) || exit 2
if [ "$vendor" != AMD ]; then
  hidden="HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES hide some"
  echo "error: no AMD GPU found (${vendor:-no GPU at all})" >&2
  echo "  remedy: rocm-smi lists those that the driver sees; $hidden;" \
    "\`samecurve run\` takes what there is, \`samecurve bench --suite cpu\` needs none" >&2
  exit 1
fi
[ -f "$1" ] && exec "$PYTHON" -P -m samecurve run "$@"
for argument in "$@"; do
  case "$argument" in
    -m | *.py) exec "$PYTHON" -P -m samecurve run "$@" ;;
  esac
done
exec "$PYTHON" -P -m samecurve bench --suite amd "$@"
