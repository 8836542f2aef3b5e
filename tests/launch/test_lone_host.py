"""A host whose first host has gone is told so in words, not in those of a socket."""

from typing import TYPE_CHECKING, cast

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from samecurve.launch.host_launch import _not_met

if TYPE_CHECKING:
    from samecurve.launch.nodes import Hosts

HOSTS = cast("Hosts", type("Hosts", (), {"host": "node-0", "port": 29500}))


@pytest.mark.parametrize(
    "words",
    [
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown",
        "Connection reset by peer\nException raised from recvBytes at Utils.hpp:787",
        "Broken pipe",
    ],
)
def test_a_first_host_that_has_gone_is_named(words: str) -> None:
    error = RendezvousConnectionError("see inner exception")
    error.__cause__ = RuntimeError(words)
    told = _not_met(error, HOSTS)
    assert "the first host, node-0:29500, has ended or can't be reached any more" in told.cause
    assert "got 0 bytes" not in str(told)
    assert "give the same command there, then here" in told.remedy
    assert told.exit_code == 75


def test_another_cause_keeps_its_words() -> None:
    told = _not_met(RendezvousConnectionError("the port is another program's"), HOSTS)
    assert "the hosts did not meet: the port is another program's" in told.cause
