"""The process of a Call: `python -m samecurve.processes MODULE FUNCTION PARENT SIGNAL ARGUMENT...`.

Its method `command` makes this command line.
"""

import sys

from samecurve.processes import Call

_, module, function, parent, ended_by, *arguments = sys.argv
sys.exit(Call(module, arguments, function, ended_by=int(ended_by), parent=int(parent)).make())
