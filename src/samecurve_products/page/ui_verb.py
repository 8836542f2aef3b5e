"""`samecurve ui`."""

from pathlib import Path

import click

from samecurve.seam import PATH, UserError, Verb


@click.command(cls=Verb, help_group="Look at runs")
@click.argument("directories", nargs=-1, type=PATH, metavar="[DIR]...")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="the address to listen at; another one than this machine's own needs --allow-remote",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="the port to listen at; 0: any free one; 8631, or a free one, if not given",
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="let other machines reach the page; whoever has the address can start programs here",
)
def ui(directories: tuple[Path, ...], *, host: str, port: int | None, allow_remote: bool) -> None:
    """The web page: plan, start, queue, watch, stop, compare runs.

    It shows the runs below each DIR, or below this directory. It prints one address, which opens
    the page in one browser.
    """
    from importlib.util import find_spec

    from samecurve.seam import install_command

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"samecurve ui needs {' and '.join(missing)}: not installed",
            install_command("ui"),
            "ui",
        )
    from samecurve_products.page.serve import serve

    serve(directories or (Path(),), host=host, port=port, allow_remote=allow_remote)
