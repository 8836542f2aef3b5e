#!/bin/sh
# A few questions about a training on several GPUs; the answers become a config.
#   scripts/start-multi-gpu.sh
# Flags answer questions beforehand; they are those of `samecurve init`:
#   scripts/start-multi-gpu.sh --devices 0,1 --preset small-language-model
# PYTHON names the Python to use; else python3, or the one that `make demo` has made.
try() {
  missing=$("$1" -c 'import sys; del sys.path[0]  # the working directory
import importlib.util as u
print(*[name for name in ("samecurve", "click", "torch") if not u.find_spec(name)])' 2>&1)
  [ -z "$missing" ] && python=$1
}
python= venv=$(dirname "$0")/../.venv/bin/python
if [ -n "$PYTHON" ]; then
  try "$PYTHON"
else
  try python3 || { [ -x "$venv" ] && try "$venv"; }
fi
[ -n "$python" ] && exec "$python" -P -m samecurve init "$@"
echo "error: ${PYTHON:-python3} has no Samecurve; missing: $missing" >&2
echo "  remedy: \`make demo\` in Samecurve's directory installs it;" \
  "or PYTHON=PATH $0 names the Python that has it" >&2
exit 2
