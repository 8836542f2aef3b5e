"""`samecurve data show`, which ends with the server that has started it, even by kill -9.

`python -m samecurve.ui.form.show_data PARENT ARGUMENT...`; a task's own code may read for ever.
"""

import runpy
import sys

from samecurve.core.system.child_process import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    sys.argv[1:] = ["data", "show", *sys.argv[2:]]
    runpy.run_module("samecurve", run_name="__main__", alter_sys=True)
