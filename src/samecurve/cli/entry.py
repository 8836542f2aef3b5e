"""The process of a command, from its first import to its end.

While the command line is imported, and once it has ended, a signal ends the process at once and
without a traceback. In between, cli/main.py hears the signals.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from samecurve.errors import Interrupted

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run() -> None:
    """Run the command line in this process."""
    _at_a_signal(_leave_beginning)
    from samecurve.cli.main import main

    code: object = 1  # of an exception, which the interpreter prints
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
        raise
    finally:
        # everything is said: the interpreter has only to shut down, which takes a while with torch
        exit_code = code if isinstance(code, int) else 1
        _at_a_signal(lambda _: os._exit(exit_code))


def run_words(*words: str) -> NoReturn:
    """Run a command line in this process, which was started or forked for it.

    The process ends without the interpreter's shutdown, which takes a while with torch.
    """
    sys.argv = ["samecurve", *words]
    code: object = 1
    try:
        run()
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _at_a_signal(leave: Callable[[int], NoReturn]) -> None:
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it for SIGHUP
            signal.signal(number, lambda number, _frame: leave(number))


def _leave_beginning(number: int) -> NoReturn:
    with suppress(OSError):  # a closed terminal
        os.write(2, f"\nstopped by {Interrupted(number).by}\n".encode())
    os._exit(128 + number)
