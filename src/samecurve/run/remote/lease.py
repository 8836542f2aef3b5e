"""The lease of a run's place in a store: one run at a time writes there.

The lease is an object that its holder renews. Its writes are conditional: of two runs that want it,
the store lets one write, and the other sees that it was late. A holder that was killed renews
nothing: after HELD seconds without a change the lease is free, by nobody's clock but the reader's.
"""

import json
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from secrets import token_hex

import psutil

from samecurve.errors import UserError
from samecurve.run.directory import boot_id
from samecurve.run.remote.stored_run import LEASE
from samecurve.storage.failures import StorageError
from samecurve.storage.place import Place
from samecurve.terminal import echo

_EVERY = 10.0  # seconds between renewals
_HELD = 35.0  # seconds without a renewal after which a holder counts as gone
_TRIES = 4  # conditional writes of a start that may come too late
_LOOK = 1.0  # seconds between looks at another's lease


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, or held it last."""

    copy: str  # of the run: which local directory
    token: str  # of this start
    host: str
    boot: str  # of that host
    pid: int
    began: float  # when that process began
    held: bool = True
    renewed: int = 0

    @classmethod
    def here(cls, copy: str) -> "Holder":
        process = psutil.Process()
        return cls(
            copy=copy,
            token=token_hex(8),
            host=socket.gethostname(),
            boot=boot_id(),
            pid=process.pid,
            began=process.create_time(),
        )

    @classmethod
    def read(cls, content: bytes) -> "Holder | None":
        """The holder that an object names; None: it is none that this program wrote."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host."""
        return (self.host, self.boot) == (socket.gethostname(), boot_id())

    def is_dead(self) -> bool:
        """Whether it is a process of this host that has ended."""
        if not self.is_here:
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.began) > 1
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def content(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Lease:
    """A lease that this process holds, and renews in a thread until release().

    before: who held it last; None: nobody
    """

    def __init__(self, place: Place, holder: Holder, tag: str, before: Holder | None) -> None:
        self.before = before
        self.lost = False  # whether another run has taken it
        self._place, self._holder, self._tag = place, holder, tag
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_on, name="lease", daemon=True)
        self._thread.start()

    def release(self, *, forget: bool = False) -> None:
        """Let go of it. forget: remove it, since nothing else is there.

        A store that does not answer is left alone: the lease ends by itself.
        """
        self._ended.set()
        with self._lock, suppress(StorageError):
            if self.lost:
                return
            if forget:
                self._place.remove([LEASE])
            else:
                self._write(replace(self._holder, held=False))

    def _renew_on(self) -> None:
        while not self._ended.wait(_EVERY):
            with self._lock, suppress(StorageError):  # the mirror says that the store fails
                if not self._ended.is_set():
                    self._holder = replace(self._holder, renewed=self._holder.renewed + 1)
                    self._write(self._holder)

    def _write(self, holder: Holder) -> None:
        try:
            self._tag = _put(self._place, holder, self._tag)
        except StorageError as error:
            if error.kind != "conflict":
                raise
            present, tag = _look(self._place)
            if present is None or present.token != holder.token:
                self.lost = True
                self._ended.set()
            else:  # an earlier write of ours, whose answer was lost
                self._tag = tag


def claim(place: Place, copy: str, where: str) -> Lease:
    """The lease of a place. Waits for one that may be of a run that was killed.

    copy: the name of the local directory

    UserError: another run renews it, or the store lets nobody write it.
    """
    wanted = Holder.here(copy)
    for _ in range(_TRIES):
        holder, tag = _look(place)
        if holder is not None and holder.held and not holder.is_dead():
            _wait_for_end(place, holder, tag, where)
        try:
            return Lease(place, wanted, _put(place, wanted, tag), holder)
        except StorageError as error:
            if error.kind != "conflict":
                raise error.as_user_error(where) from None
            holder, tag = _look(place)
            if holder is not None and holder.token == wanted.token:
                return Lease(place, wanted, tag, None)
    raise UserError(
        f"{place.url}/{LEASE} could not be written in {_TRIES} tries: each time the store said that"
        " somebody else had written it meanwhile, and it belongs to no live run",
        "one start at a time at this address; if there is no other, the store's tags (ETag) change"
        " without a write, and it can't hold a run: another store, or a --save-dir on a disk",
        where,
    )


def _wait_for_end(place: Place, holder: Holder, tag: str, where: str) -> None:
    """Wait until a lease was not renewed for long. UserError: its run lives."""
    who = f"process {holder.pid} on {holder.host}"
    lives = UserError(
        f"{place.url} belongs to a live run: {who}",
        "wait for it, stop it, or another --save-dir",
        where,
    )
    if holder.is_here:
        raise lives
    echo(
        f"store  {place.url} was last held by {who}: waiting {_HELD:.0f} s to see whether that run"
        " lives",
        err=True,
    )
    until = time.monotonic() + _HELD
    while time.monotonic() < until:
        time.sleep(_LOOK)
        present, new_tag = _look(place)
        if present is None or not present.held:
            return
        if new_tag != tag:
            raise lives


def _look(place: Place) -> tuple[Holder | None, str]:
    """The holder and the lease's tag; '': there is no lease."""
    try:
        content, tag = place.read_tagged(LEASE)
    except StorageError as error:
        if error.kind != "missing":
            raise
        return None, ""
    return Holder.read(content), tag


def _put(place: Place, holder: Holder, tag: str) -> str:
    try:
        return place.write(LEASE, holder.content(), replacing=tag)
    except StorageError as error:
        if error.kind != "unsupported":
            raise
        # the page says so: such a store can't tell two runs apart that begin at the same moment
        return place.write(LEASE, holder.content())
