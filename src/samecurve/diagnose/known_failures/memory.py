"""Known failures for want of memory, room or processes."""

from samecurve.diagnose.known_failures.entry import known

MEMORY = (
    known(
        "data worker: shared memory full",
        patterns=(
            r"unable to allocate shared memory\(shm\)",
            r"DataLoader worker[^\n]*Bus error",
            r"insufficient shared memory \(shm\)",
            r"unable to (?:open shared memory object|mmap \d+ bytes from file) </torch_",
        ),
        cause="a data worker found no room in /dev/shm for its batch",
        remedy=(
            "`df -h /dev/shm`; docker run --shm-size=8g (or --ipc=host); fewer or smaller batches"
            " ahead: num_workers, prefetch_factor"
        ),
    ),
    known(
        "libraries past the limit",
        patterns=(r"ImportError: (?P<what>[^\n:]+): failed to map segment from shared object",),
        cause="{what} could not be loaded into memory",
        remedy=(
            "`ulimit -v` limits the address space: unlimited; or /tmp, or where it lies, is mounted"
            " noexec"
        ),
    ),
    known(
        "CPU out of memory",
        patterns=(
            r"Unable to allocate (?P<asked>[\d.]+ \w+) for an array",
            r"you tried to allocate (?P<asked>\d+ bytes)",
            r"^MemoryError\b",
            r"\[Errno 12\]",
            r"Cannot allocate memory",
            r"std::bad_alloc",
        ),
        cause="the process could not get more memory ({asked})",
        remedy=(
            "smaller arrays or fewer samples at once; `free -h`, `ulimit -v` and the container's"
            " limit show what there is"
        ),
    ),
    known(
        "too many processes",
        patterns=(
            r"can't start new thread",
            r"Resource temporarily unavailable",
            r"libgomp: Thread creation failed",
            r"pthread_create failed",
        ),
        cause="the system let no more threads or processes start",
        remedy=(
            "`ulimit -u`, and pids.max of a container, limit them; fewer data workers,"
            " OMP_NUM_THREADS=1"
        ),
        again=True,
    ),
    known(
        "too many open files",
        patterns=(r"Too many open files",),
        cause="the process may open no more files",
        remedy=(
            "`ulimit -n 65536` before the start; data workers:"
            " torch.multiprocessing.set_sharing_strategy('file_system')"
        ),
    ),
    known(
        "no space left",
        patterns=(
            r"\[Errno 28\]",
            r"No space left on device",
            r"Disk quota exceeded",
        ),
        cause="no space is left on a disk that is written to",
        remedy="`df -h`, `df -i`, `quota`; free some, or write elsewhere",
    ),
    known(
        "no space left: torch.save",
        patterns=(
            r"unexpected pos \d+ vs \d+",
            r"PytorchStreamWriter failed writing file",
        ),
        cause="torch.save could not write its file to the end: the disk is full, as a rule",
        remedy="`df -h` of where it is written; the file is not whole: remove it",
    ),
)
