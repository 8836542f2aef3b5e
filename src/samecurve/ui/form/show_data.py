"""`samecurve data show`, which ends with the server that has started it, even by kill -9.

`python -m samecurve.ui.form.show_data PARENT ROOTS FILE ARGUMENT...`: ROOTS are the page's folders
as JSON. Data that links lead to from outside of them are not shown. A task's own code may read for
ever.
"""

import json
import runpy
import sys
from pathlib import Path

from samecurve.core.config.document import read_file
from samecurve.core.system.child_process import die_with
from samecurve.errors import UserError
from samecurve.ui.form.draft import error_json
from samecurve.ui.form.links import check_links
from samecurve.ui.form.places import Roots


def main(parent: str, roots: str, file: str, *arguments: str) -> None:
    die_with(int(parent))
    try:
        check_links(read_file(Path(file)).value, Roots.of(json.loads(roots)), Path.cwd())
    except UserError as error:
        print(json.dumps({"errors": [error_json(error, error.where)]}))
        sys.exit(2)
    sys.argv[1:] = ["data", "show", "-f", file, *arguments]
    runpy.run_module("samecurve", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
