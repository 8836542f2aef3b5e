"""`samecurve data show`, for the page. A task's own code may read for ever."""

import json
import runpy
import sys
from pathlib import Path

from samecurve.seam import UserError, read_document
from samecurve_products.page.form.draft import error_json
from samecurve_products.page.form.links import check_links
from samecurve_products.page.form.places import Roots


def main(roots: str, file: str, *arguments: str) -> None:
    """Show the data of a config, but none that a link leads to from outside of the page's folders.

    roots: the page's folders as JSON
    """
    try:
        check_links(read_document(Path(file)).value, Roots.of(json.loads(roots)), Path.cwd())
    except UserError as error:
        print(json.dumps({"errors": [error_json(error, error.where)]}))
        sys.exit(2)
    sys.argv[1:] = ["data", "show", "-f", file, *arguments]
    runpy.run_module("samecurve", run_name="__main__", alter_sys=True)
