"""Programs that are started, waited for and ended."""

import os
import signal
import sys
from subprocess import DEVNULL, PIPE

import pytest

from samecurve.processes import how_ended, output_of, signal_group, start_program, wait_for


def test_the_output_of_a_program() -> None:
    """Bytes that are no text are shown as escapes; the program has nothing to read."""
    code = "import sys; sys.stdout.buffer.write(b'\\xff' + sys.stdin.buffer.read()); exit(3)"
    done = output_of([sys.executable, "-c", code], environment={"HOME": "/"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "\\xff", "")
    with pytest.raises(TimeoutError, match="sleep took more than"):
        output_of(["sleep", "60"], seconds=0.1)
    with pytest.raises(FileNotFoundError):
        output_of(["no-such-program"])


def test_a_group_ends_with_all_that_its_leader_has_started() -> None:
    process = start_program(
        ["sh", "-c", "sleep 60 & echo $!; wait"], new_session=True, stdin=DEVNULL, stdout=PIPE
    )
    assert process.stdout
    child = int(process.stdout.readline())
    assert os.getpgid(child) == process.pid
    assert not wait_for([process], 0.05)
    signal_group(process.pid)
    assert process.stdout.read() == b""  # both have closed it
    assert wait_for([process], 10)
    assert how_ended(process.wait()) == "SIGKILL"
    process.stdout.close()
    signal_group(process.pid, signal.SIGTERM)  # nobody is left
    assert how_ended(3) == "exit code 3"
