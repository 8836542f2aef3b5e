"""Known failures of GPUs, their drivers and their libraries."""

from samecurve.diagnose.known_failures.entry import known

DEVICES = (
    known(
        "two ranks on one GPU",
        patterns=(
            r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on (?:CUDA"
            r" )?device (?P<device>\w+)",
        ),
        cause="ranks {one} and {other} use the same GPU ({device})",
        remedy=(
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, and no'
            " more ranks than GPUs"
        ),
    ),
    known(
        "NCCL versions differ",
        patterns=(r"Mismatched NCCL version detected ?:? ?(?P<what>[^\n]*)",),
        cause="the ranks have different versions of NCCL: {what}",
        remedy=(
            "the same torch on every host; unset LD_LIBRARY_PATH or LD_PRELOAD where they name"
            " another libnccl"
        ),
    ),
    known(
        "NCCL: shared memory full",
        patterns=(
            r"Error while (?:creating|attaching to) shared memory segment (?P<path>\S+)(?: \(size"
            r" (?P<size>\d+)\))?",
        ),
        cause="NCCL found no room in /dev/shm",
        remedy=(
            "`df -h /dev/shm`; docker run --shm-size=8g (or --ipc=host); NCCL_SHM_DISABLE=1 goes"
            " without, slower"
        ),
    ),
    known(
        "GPU hardware",
        patterns=(
            r"uncorrectable ECC error",
            r"GPU has fallen off the bus",
            r"CUDA error: (?P<what>hardware stack error|unspecified launch failure|an uncorrectable"
            r" NVLink error)",
        ),
        cause="a GPU failed ({what})",
        remedy=(
            "`nvidia-smi -q -d ECC` and `dmesg | grep Xid` name it; leave it out (--gpus), or reset"
            " the machine"
        ),
        again=True,
    ),
    known(
        "GPU out of memory",
        patterns=(
            r"out of memory\. Tried to allocate (?P<asked>[\d.]+ \w+)\. GPU (?P<gpu>\d+) has a"
            r" total"
            r" capacity of (?P<size>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free",
        ),
        cause="GPU {gpu} ran out of memory: {asked} were asked for, {free} of {size} were free",
        remedy=(
            "fewer samples at once with more gradient accumulation keep the batch; activation"
            " checkpointing; FSDP; `nvidia-smi` shows who else holds memory"
        ),
    ),
    known(
        "GPU out of memory, no size",
        patterns=(
            r"(?:CUDA|HIP) (?:error: )?out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"RESOURCE_EXHAUSTED: (?P<what>[^\n]{0,120})",
        ),
        cause="a GPU ran out of memory ({what})",
        remedy=(
            "fewer samples at once with more gradient accumulation keep the batch; `nvidia-smi`"
            " shows who else holds memory"
        ),
    ),
    known(
        "illegal memory access",
        patterns=(
            r"CUDA error: (?:an illegal memory access was encountered|misaligned address|an illegal"
            r" instruction was encountered)",
            r"CUDA_ERROR_ILLEGAL_ADDRESS",
        ),
        cause=(
            "a kernel on the GPU read or wrote outside its memory; the line named below may be a"
            " later one"
        ),
        remedy=(
            "CUDA_LAUNCH_BLOCKING=1 names the line, `compute-sanitizer python ...` the kernel;"
            " custom kernels, and indices out of range, are the usual reasons"
        ),
    ),
    known(
        "device-side assert",
        patterns=(r"CUDA error: device-side assert triggered",),
        cause=(
            "a check inside a kernel on the GPU failed, mostly an index out of range: a label"
            " beyond the classes, a token beyond the vocabulary"
        ),
        remedy=(
            "the log has the check (`Assertion ... failed`); CUDA_LAUNCH_BLOCKING=1, or a run on"
            " the CPU, names the line"
        ),
    ),
    known(
        "no kernel for this GPU",
        patterns=(
            r"no kernel image is available for execution on the device",
            r"HIP error: invalid device function",
        ),
        cause="this torch was not built for this GPU",
        remedy=(
            "`python -c 'import torch; print(torch.cuda.get_arch_list())'` lists what it is for;"
            " install the build for your CUDA or ROCm"
        ),
    ),
    known(
        "driver too old",
        patterns=(
            r"NVIDIA driver on your system is too old \(found (?P<version>version \d+)\)",
            r"CUDA driver version is insufficient for CUDA runtime version",
        ),
        cause="the NVIDIA driver is too old for this torch ({version})",
        remedy=(
            "a newer driver, or a torch built for an older CUDA (--index-url of that cu version);"
            " `nvidia-smi` shows what the driver can do"
        ),
    ),
    known(
        "no GPU",
        patterns=(
            r"Found no NVIDIA driver on your system",
            r"No (?:CUDA|HIP) GPUs are available",
            r"no CUDA-capable device is detected",
        ),
        cause="the process sees no GPU",
        remedy=(
            "`nvidia-smi`; CUDA_VISIBLE_DEVICES; in a container --gpus all; or backend gloo on"
            " the CPU"
        ),
    ),
    known(
        "torch without CUDA",
        patterns=(
            r"Torch not compiled with CUDA enabled",
            r"module 'torch\._C' has no attribute '_cuda_\w+'",
            r"Distributed package doesn't have NCCL built in",
            r"ProcessGroupNCCL is only supported with GPUs",
        ),
        cause="the program asks for CUDA or NCCL, and this torch or this machine has none",
        remedy='a CUDA build of torch, or device "cpu" and init_process_group("gloo")',
    ),
    known(
        "no such GPU",
        patterns=(
            r"CUDA error: invalid device ordinal",
            r"HIP error: invalid device ordinal",
        ),
        cause="the process chose a GPU that it does not see",
        remedy=(
            "no more ranks than GPUs; LOCAL_RANK, not RANK, chooses the GPU; CUDA_VISIBLE_DEVICES"
            " may hide some"
        ),
    ),
    known(
        "CUDA in a forked process",
        patterns=(r"Cannot re-initialize CUDA in forked subprocess",),
        cause="a forked process used CUDA after its parent had",
        remedy=(
            'multiprocessing_context="spawn" for the DataLoader, or no CUDA tensors in data workers'
        ),
    ),
)
