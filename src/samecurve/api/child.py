"""The process that a call from Python starts: the command line, which ends with its parent."""

import signal
import sys

from samecurve.core.system.parent_death import die_with


def main(parent: str, *arguments: str) -> None:
    """Run the command line in a process that is told to stop if its parent ends."""
    from samecurve.cli.main import main as run_command

    die_with(int(parent), signal.SIGTERM)
    sys.argv = ["samecurve", *arguments]
    run_command()


if __name__ == "__main__":
    main(*sys.argv[1:])
