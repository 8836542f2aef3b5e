"""Known failures: what is printed, what it means, what to do.

The first entry that matches an error's text is it, so the more specific stand first.

A `symptom`: a rank that says so may only have lost another one, or waited for it in vain; it is the
cause where no rank failed for a reason of its own.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from samecurve.system import install_command

_UNUSED = r"Expected to have finished reduction in the prior iteration"
_COLLECTIVE = (
    r"is running collective: CollectiveFingerPrint\((?:SequenceNumber=\d+,"
    r" )?OpType=(?P<{0}>\w+)(?:, TensorShape=(?P<{0}_of>\[[^\]]*\]))?"
)
_ADDRESS = r" to \(?\[?(?P<host>[^\s,\[\]()]+)\]?(?:, |:)(?P<port>\d+)"


Symptom = Literal["", "lost", "waited"]
_INSTALL = re.compile(r"pip install 'samecurve\[([\w,]+)\]'")  # as the page has it


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """One row of the table, also of docs/failures.md."""

    name: str
    patterns: tuple[re.Pattern[str], ...]  # of an error's text
    cause: str  # over the groups of the pattern that matched: {port}
    remedy: str  # likewise
    again: bool = False  # starting again may help
    symptom: Symptom = ""  # it may only have lost another rank, or waited for it

    def explain(self, match: re.Match[str]) -> "Diagnosis":
        """Cause and remedy with the names and numbers of this match."""
        texts = {name: " ".join((text or "").split()) for name, text in match.groupdict().items()}
        groups = defaultdict(str, texts)
        cause = self.cause.format_map(groups).replace("()", "")  # a group that matched nothing
        cause = re.sub(r" +", " ", cause).rstrip(" :")
        remedy = self.remedy.format_map(groups)
        remedy = _INSTALL.sub(lambda command: install_command(command[1]), remedy)
        return Diagnosis(self, cause, remedy)


@dataclass(frozen=True)
class Diagnosis:
    """A known failure as it happened here."""

    known: KnownFailure
    cause: str
    remedy: str


def diagnose(text: str) -> Diagnosis | None:
    """The known failure that an error's text is; None: no entry matches."""
    for known in KNOWN_FAILURES:
        for pattern in known.patterns:
            if match := pattern.search(text):
                return known.explain(match)
    return None


def _known(
    name: str,
    *patterns: str,
    cause: str,
    remedy: str,
    again: bool = False,
    symptom: Symptom = "",
) -> KnownFailure:
    return KnownFailure(
        name=name,
        patterns=tuple(re.compile(pattern, re.MULTILINE) for pattern in patterns),
        cause=cause,
        remedy=remedy,
        again=again,
        symptom=symptom,
    )


_DEVICES = (
    _known(
        "two ranks on one GPU",
        r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on (?:CUDA"
        r" )?device (?P<device>\w+)",
        cause="ranks {one} and {other} use the same GPU ({device})",
        remedy=(
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, and no'
            " more ranks than GPUs"
        ),
    ),
    _known(
        "NCCL versions differ",
        r"Mismatched NCCL version detected ?:? ?(?P<what>[^\n]*)",
        cause="the ranks have different versions of NCCL: {what}",
        remedy=(
            "the same torch on every host; unset LD_LIBRARY_PATH or LD_PRELOAD where they name"
            " another libnccl"
        ),
    ),
    _known(
        "NCCL: shared memory full",
        r"Error while (?:creating|attaching to) shared memory segment (?P<path>\S+)(?: \(size"
        r" (?P<size>\d+)\))?",
        cause="NCCL found no room in /dev/shm",
        remedy=(
            "`df -h /dev/shm`; docker run --shm-size=8g (or --ipc=host); NCCL_SHM_DISABLE=1 goes"
            " without, slower"
        ),
    ),
    _known(
        "GPU hardware",
        r"uncorrectable ECC error",
        r"GPU has fallen off the bus",
        r"CUDA error: (?P<what>hardware stack error|unspecified launch failure|an uncorrectable"
        r" NVLink error)",
        cause="a GPU failed ({what})",
        remedy=(
            "`nvidia-smi -q -d ECC` and `dmesg | grep Xid` name it; leave it out (--gpus), or reset"
            " the machine"
        ),
        again=True,
    ),
    _known(
        "GPU out of memory",
        r"out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a total"
        r" capacity of (?P<size>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free",
        cause="GPU {gpu} ran out of memory: {asked} were asked for, {free} of {size} were free",
        remedy=(
            "fewer samples at once with more gradient accumulation keep the batch; activation"
            " checkpointing; FSDP; `nvidia-smi` shows who else holds memory"
        ),
    ),
    _known(
        "GPU out of memory, no size",
        r"(?:CUDA|HIP) (?:error: )?out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"RESOURCE_EXHAUSTED: (?P<what>[^\n]{0,120})",
        cause="a GPU ran out of memory ({what})",
        remedy=(
            "fewer samples at once with more gradient accumulation keep the batch; `nvidia-smi`"
            " shows who else holds memory"
        ),
    ),
    _known(
        "illegal memory access",
        r"CUDA error: (?:an illegal memory access was encountered|misaligned address|an illegal"
        r" instruction was encountered)",
        r"CUDA_ERROR_ILLEGAL_ADDRESS",
        cause=(
            "a kernel on the GPU read or wrote outside its memory; the line named below may be a"
            " later one"
        ),
        remedy=(
            "CUDA_LAUNCH_BLOCKING=1 names the line, `compute-sanitizer python ...` the kernel;"
            " custom kernels, and indices out of range, are the usual reasons"
        ),
    ),
    _known(
        "device-side assert",
        r"CUDA error: device-side assert triggered",
        cause=(
            "a check inside a kernel on the GPU failed, mostly an index out of range: a label"
            " beyond the classes, a token beyond the vocabulary"
        ),
        remedy=(
            "the log has the check (`Assertion ... failed`); CUDA_LAUNCH_BLOCKING=1, or a run on"
            " the CPU, names the line"
        ),
    ),
    _known(
        "no kernel for this GPU",
        r"no kernel image is available for execution on the device",
        r"HIP error: invalid device function",
        cause="this torch was not built for this GPU",
        remedy=(
            "`python -c 'import torch; print(torch.cuda.get_arch_list())'` lists what it is for;"
            " install the build for your CUDA or ROCm"
        ),
    ),
    _known(
        "driver too old",
        r"NVIDIA driver on your system is too old \(found (?P<version>version \d+)\)",
        r"CUDA driver version is insufficient for CUDA runtime version",
        cause="the NVIDIA driver is too old for this torch ({version})",
        remedy=(
            "a newer driver, or a torch built for an older CUDA (--index-url of that cu version);"
            " `nvidia-smi` shows what the driver can do"
        ),
    ),
    _known(
        "no GPU",
        r"Found no NVIDIA driver on your system",
        r"No (?:CUDA|HIP) GPUs are available",
        r"no CUDA-capable device is detected",
        cause="the process sees no GPU",
        remedy=(
            "`nvidia-smi`; CUDA_VISIBLE_DEVICES; in a container --gpus all; or backend gloo on"
            " the CPU"
        ),
    ),
    _known(
        "torch without CUDA",
        r"Torch not compiled with CUDA enabled",
        r"Distributed package doesn't have NCCL built in",
        r"ProcessGroupNCCL is only supported with GPUs",
        cause="the program asks for CUDA or NCCL, and this torch or this machine has none",
        remedy='a CUDA build of torch, or device "cpu" and init_process_group("gloo")',
    ),
    _known(
        "no such GPU",
        r"CUDA error: invalid device ordinal",
        r"HIP error: invalid device ordinal",
        cause="the process chose a GPU that it does not see",
        remedy=(
            "no more ranks than GPUs; LOCAL_RANK, not RANK, chooses the GPU; CUDA_VISIBLE_DEVICES"
            " may hide some"
        ),
    ),
    _known(
        "CUDA in a forked process",
        r"Cannot re-initialize CUDA in forked subprocess",
        cause="a forked process used CUDA after its parent had",
        remedy=(
            'multiprocessing_context="spawn" for the DataLoader, or no CUDA tensors in data workers'
        ),
    ),
)

_MEMORY = (
    _known(
        "data worker: shared memory full",
        r"unable to allocate shared memory\(shm\)",
        r"DataLoader worker[^\n]*Bus error",
        r"insufficient shared memory \(shm\)",
        r"unable to (?:open shared memory object|mmap \d+ bytes from file) </torch_",
        cause="a data worker found no room in /dev/shm for its batch",
        remedy=(
            "`df -h /dev/shm`; docker run --shm-size=8g (or --ipc=host); fewer or smaller batches"
            " ahead: num_workers, prefetch_factor"
        ),
    ),
    _known(
        "libraries past the limit",
        r"ImportError: (?P<what>[^\n:]+): failed to map segment from shared object",
        cause="{what} could not be loaded into memory",
        remedy=(
            "`ulimit -v` limits the address space: unlimited; or /tmp, or where it lies, is mounted"
            " noexec"
        ),
    ),
    _known(
        "CPU out of memory",
        r"Unable to allocate (?P<asked>[\d.]+ \w+) for an array",
        r"you tried to allocate (?P<asked>\d+ bytes)",
        r"^MemoryError\b",
        r"\[Errno 12\]",
        r"Cannot allocate memory",
        r"std::bad_alloc",
        cause="the process could not get more memory ({asked})",
        remedy=(
            "smaller arrays or fewer samples at once; `free -h`, `ulimit -v` and the container's"
            " limit show what there is"
        ),
    ),
    _known(
        "too many processes",
        r"can't start new thread",
        r"Resource temporarily unavailable",
        r"libgomp: Thread creation failed",
        r"pthread_create failed",
        cause="the system let no more threads or processes start",
        remedy=(
            "`ulimit -u`, and pids.max of a container, limit them; fewer data workers,"
            " OMP_NUM_THREADS=1"
        ),
        again=True,
    ),
    _known(
        "too many open files",
        r"Too many open files",
        cause="the process may open no more files",
        remedy=(
            "`ulimit -n 65536` before the start; data workers:"
            " torch.multiprocessing.set_sharing_strategy('file_system')"
        ),
    ),
    _known(
        "no space left",
        r"\[Errno 28\]",
        r"No space left on device",
        r"Disk quota exceeded",
        cause="no space is left on a disk that is written to",
        remedy="`df -h`, `df -i`, `quota`; free some, or write elsewhere",
    ),
    _known(
        "no space left: torch.save",
        r"unexpected pos \d+ vs \d+",
        r"PytorchStreamWriter failed writing file",
        cause="torch.save could not write its file to the end: the disk is full, as a rule",
        remedy="`df -h` of where it is written; the file is not whole: remove it",
    ),
)

_USER_CODE = (
    _known(
        "unused parameters",
        _UNUSED + r"[\s\S]*?Parameter(?:s| indices) which did not receive grad for rank \d+:"
        r" (?P<which>[^\n]{1,150})",
        _UNUSED,
        cause="parameters had no part in the loss, and DDP waits for their gradients: {which}",
        remedy=(
            "DistributedDataParallel(..., find_unused_parameters=True), or requires_grad_(False)"
            " for them; TORCH_DISTRIBUTED_DEBUG=INFO gives names instead of numbers"
        ),
    ),
    _known(
        "gradient ready twice",
        r"Expected to mark a variable ready only once",
        cause="a parameter's gradient was ready twice in one backward",
        remedy=(
            "checkpoint(..., use_reentrant=False); one forward through DDP for each backward; or"
            " static_graph=True"
        ),
    ),
    _known(
        "models differ",
        r"DDP expects same model across all ranks, but Rank (?P<one>\d+) has (?P<count>\d+) params,"
        r" while rank (?P<other>\d+) has inconsistent (?P<inconsistent>\d+) params",
        cause=(
            "the ranks have different models: {count} parameters on rank {one}, {inconsistent} on"
            " rank {other}"
        ),
        remedy=(
            "build the model from the same config and data on every rank, by nothing that depends"
            " on the rank"
        ),
    ),
    _known(
        "model shapes differ",
        r"params\[(?P<index>\d+)\] in this process with (?P<what>sizes|strides) (?P<own>\[[^\]]*\])"
        r" appears not to match",
        cause=(
            "the ranks have different models: parameter {index} has {what} {own} here and others on"
            " rank 0"
        ),
        remedy=(
            "build the model from the same config and data on every rank (a vocabulary or classes"
            " counted from a shard differ)"
        ),
    ),
    _known(
        "collectives differ",
        r"Rank (?P<one>\d+) "
        + _COLLECTIVE.format("first")
        + r"[\s\S]*?Rank (?P<other>\d+) "
        + _COLLECTIVE.format("second"),
        r"Detected mismatch between collectives on ranks",
        cause=(
            "the ranks called different collectives: rank {one} {first}{first_of}, rank {other}"
            " {second}{second_of}"
        ),
        remedy=(
            "every rank makes the same calls, in the same order, with the same shapes: pad, or"
            " drop_last=True; no `if rank == 0` around one"
        ),
    ),
    _known(
        "shapes differ (gloo)",
        r"op\.preamble\.length <= op\.nbytes\. (?P<got>\d+) vs (?P<own>\d+)",
        cause=(
            "the ranks gave one collective tensors of different sizes ({got} bytes came, room was"
            " for {own}), or called different ones"
        ),
        remedy=(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names collective and shapes; every rank gives the same:"
            " pad, or drop_last=True"
        ),
    ),
    _known(
        "data worker died",
        r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>exited unexpectedly|is"
        r" killed by signal: \w+)",
        cause="data worker (pid {pids}) {how}",
        remedy=(
            "`dmesg` says whether memory ran out: fewer num_workers; num_workers=0 shows an error"
            " of the data set itself"
        ),
        again=True,
    ),
    _known(
        "engine not installed",
        r"ModuleNotFoundError: No module named '(?P<module>jax|jaxlib|flax|optax)\b",
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[jax]' (for NVIDIA GPUs also 'jax[cuda13]')",
    ),
    _known(
        "extra not installed",
        r"ModuleNotFoundError: No module named '(?P<module>tensorboard|wandb)\b",
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[{module}]'",
    ),
    _known(
        "matplotlib not installed",
        r"ModuleNotFoundError: No module named '(?P<module>matplotlib)\b",
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[report]'",
    ),
    _known(
        "transformers not installed",
        r"ModuleNotFoundError: No module named '(?P<module>transformers)\b",
        cause="module {module} is not installed",
        remedy="pip install 'samecurve[hf]'",
    ),
    _known(
        "module not found",
        r"ModuleNotFoundError: No module named '(?P<module>[^']+)'",
        cause="module {module} was not found",
        remedy=(
            "`python -m pip install` it with this same python (`which python`); if it is yours,"
            " start from its directory or set PYTHONPATH"
        ),
    ),
    _known(
        "name not in its module",
        r"ImportError: cannot import name '(?P<name>[^']+)' from (?:partially initialized module"
        r" )?'(?P<module>[^']+)'(?:[^\n]*\((?P<path>[^()]+)\))?",
        cause="{module} has no {name} ({path})",
        remedy=(
            "another version of that package, or a file of yours with its name in the way, or two"
            " modules that import each other"
        ),
    ),
    _known(
        "library not found",
        r"ImportError: (?P<what>lib[^\s:]+\.so[^\s:]*): cannot open shared object file",
        cause="the library {what} was not found",
        remedy=(
            "install the package that has it; LD_LIBRARY_PATH; torch and CUDA packages of one index"
        ),
    ),
    _known(
        "syntax error",
        r"^(?P<kind>SyntaxError|IndentationError|TabError): (?P<what>[^\n]*)",
        cause="{kind}: {what}",
        remedy="correct the line named above; `python -m py_compile FILE` checks without a run",
    ),
    _known(
        "checkpoint saved from DDP",
        r"Error\(s\) in loading state_dict for (?P<model>\w+):[\s\S]*?Unexpected key\(s\) in"
        r" state_dict: \"module\.",
        cause=(
            "the checkpoint's names begin with `module.`: it was saved from a DDP wrapper, and"
            " {model} is none"
        ),
        remedy=(
            "load into model.module, or save model.module.state_dict(); or cut the prefix:"
            " name.removeprefix('module.')"
        ),
    ),
    _known(
        "checkpoint of another model",
        r"Error\(s\) in loading state_dict for (?P<model>\w+):\s+(?P<first>[^\n]{1,200})",
        cause="the checkpoint is of another model than {model}: {first}",
        remedy=(
            "the config that it was saved with; strict=False leaves out what does not fit by name"
        ),
    ),
    _known(
        "checkpoint damaged",
        r"PytorchStreamReader failed",
        r"failed finding central directory",
        r"EOFError: Ran out of input",
        r"Error while deserializing header",
        cause="a checkpoint file is not whole",
        remedy=(
            "an older one; the disk may have been full, or the process killed, while it was saved"
        ),
    ),
    _known(
        "checkpoint is a pickle",
        r"Weights only load failed",
        cause="the file holds more than tensors, and torch.load takes only these since 2.6",
        remedy=(
            "save state_dicts of tensors and numbers; torch.serialization.add_safe_globals for"
            " types that you trust"
        ),
    ),
    _known(
        "no __main__ guard",
        r"An attempt has been made to start a new process before the",
        cause="the script starts processes while it is imported by them",
        remedy='put what the script does under `if __name__ == "__main__":`',
    ),
    _known(
        "no process group",
        r"Default process group has not been initialized",
        cause="a collective was called without a process group",
        remedy=(
            "torch.distributed.init_process_group() first; and start by torchrun or `samecurve"
            " run`, not by plain python"
        ),
    ),
    _known(
        "no rank in the environment",
        r"environment variable (?P<name>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK)"
        r" expected, but not set",
        r"KeyError: '(?P<name>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)'",
        cause="{name} is not set: nobody told this process which rank it is",
        remedy="start it by torchrun --nproc_per_node=N SCRIPT, or by `samecurve run SCRIPT`",
    ),
)

_COMPILING = (
    _known(
        "too many shapes",
        r"FailOnRecompileLimitHit",
        cause="train.compile: the model is called with ever other shapes, and each is compiled",
        remedy="samples of a few lengths (pad them), or leave --compile out",
    ),
    _known(
        "no C++ compiler",
        r"InvalidCxxCompiler: (?P<what>[^\n]{0,160})",
        cause="to compile a model for a CPU, torch needs a C++ compiler: {what}",
        remedy="install g++ (CXX names another), or leave --compile out",
    ),
    _known(
        "no triton",
        r"TritonMissing",
        r"Cannot find a working triton installation",
        cause="to compile a model for a GPU, torch needs triton, which was not found",
        remedy="a torch wheel for CUDA brings it (pip install triton), or leave --compile out",
    ),
)

_RENDEZVOUS = (
    _known(
        "address in use",
        r"port: (?P<port>\d+)[^\n]*EADDRINUSE",
        r"EADDRINUSE",
        r":(?P<port>\d+) \(errno: 98 - Address already in use",
        r"[Aa]ddress already in use",
        cause="port {port} is taken: another run on this machine, or one that was not ended",
        remedy=(
            "another --master_port, or none (`samecurve` takes a free one); `ss -ltnp` names who"
            " listens there"
        ),
        again=True,
    ),
    _known(
        "master not reached",
        r"client socket has timed out after (?P<ms>\d+)ms while trying to connect" + _ADDRESS,
        r"client socket has failed to connect to any network address of \((?P<host>[^,\s]+),"
        r" (?P<port>\d+)\)",
        cause="the first rank was not reached at {host}:{port}",
        remedy=(
            "is it running there, does the name resolve (`getent hosts {host}`), does a firewall"
            " let the port through? MASTER_ADDR, MASTER_PORT"
        ),
        again=True,
        symptom="lost",
    ),
    _known(
        "ranks missing",
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\."
        r" (?P<here>\d+)/(?P<world>\d+) clients joined",
        cause="{here} of {world} ranks came within {seconds} s",
        remedy=(
            "start them all: WORLD_SIZE is the number of processes; slow imports over a network"
            " want init_process_group(timeout=...)"
        ),
        again=True,
        symptom="waited",
    ),
    _known(
        "a rank came not to the barrier",
        r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier in \d+ ms",
        cause="rank {ranks} did not come to the barrier",
        remedy="its log says where it was; `py-spy dump` shows a live one",
        again=True,
        symptom="waited",
    ),
    _known(
        "NCCL watchdog",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+),"
        r" OpType=(?P<op>\w+)[^\n]*? ran for (?P<ms>\d+) milliseconds",
        cause="collective {number} ({op}) did not end within {ms} ms: some rank never came to it",
        remedy=(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names a rank that calls another one; `py-spy dump`"
            " shows a live one; init_process_group(timeout=...) for long work between steps"
        ),
        again=True,
        symptom="waited",
    ),
    _known(
        "NCCL: another rank",
        r"ncclRemoteError",
        r"NCCL communicator was aborted",
        r"Some NCCL operations have failed or timed out",
        cause="NCCL lost another rank",
        remedy="that one's log, or its host's terminal, says why",
        again=True,
        symptom="lost",
    ),
    _known(
        "NCCL: invalid usage",
        r"ncclInvalidUsage[\s\S]*?Last error:\s*(?P<what>[^\n]+)",
        r"ncclInvalidUsage",
        r"NCCL error[^\n]*invalid (?:usage|argument)",
        cause="NCCL was used wrongly ({what})",
        remedy=(
            "NCCL_DEBUG=INFO says more; mostly two ranks on one GPU, or tensors of different sizes"
            " or types: TORCH_DISTRIBUTED_DEBUG=DETAIL"
        ),
    ),
    _known(
        "NCCL: system error",
        r"ncclSystemError[\s\S]*?Last error:\s*(?P<what>[^\n]+)",
        r"ncclSystemError",
        r"unhandled system error",
        cause="NCCL failed in a call to the system ({what})",
        remedy=(
            "NCCL_DEBUG=INFO says which; NCCL_SOCKET_IFNAME chooses the network, NCCL_IB_DISABLE=1"
            " leaves InfiniBand out; /dev/shm full?"
        ),
        again=True,
    ),
    _known(
        "NCCL: CUDA error",
        r"ncclUnhandledCudaError",
        r"NCCL error[^\n]*unhandled cuda error",
        r"ncclInternalError",
        cause="NCCL failed in a call to CUDA",
        remedy=(
            "NCCL_DEBUG=INFO says which; NCCL_P2P_DISABLE=1 goes around a broken link between GPUs;"
            " memory full?"
        ),
        again=True,
    ),
    _known(
        "a collective timed out",
        r"Timed out waiting \d+ms for (?P<what>\w+) operation to complete",
        r"wait timeout after \d+ms, keys: (?P<what>[^\n]{1,100})",
        r"Socket Timeout",
        r"DistStoreError: (?P<what>[^\n]*timeout[^\n]*)",
        cause="another rank did not answer in time ({what})",
        remedy=(
            "its log says where it was; `py-spy dump` shows a live one;"
            " TORCH_DISTRIBUTED_DEBUG=DETAIL names ranks that call different collectives"
        ),
        again=True,
        symptom="waited",
    ),
    _known(
        "another rank lost",
        r"Connection closed by peer",
        r"Connection reset by peer",
        r"Broken pipe",
        r"Connection refused",
        r"remote process exited",
        r"Socket closed",
        r"[Ff]ailed to recv, got 0 bytes",
        r"[Cc]onnection was likely closed",
        r"recvValue(?:WithTimeout)? failed",
        r"sendBytes failed",
        cause="it lost another rank, or the connection to it",
        remedy=(
            "what ended that one stands in its log, or on its host's terminal; the same command"
            " again goes on from the last save, where there is one"
        ),
        again=True,
        symptom="lost",
    ),
)

KNOWN_FAILURES = (*_COMPILING, *_DEVICES, *_MEMORY, *_USER_CODE, *_RENDEZVOUS)
