"""Which GPUs of the emulated machine a process sees, as CUDA and HIP choose by the environment.

The drivers' libraries (NVML, amdsmi) do not obey these variables. torch is not imported here.
"""

import re
from collections.abc import Mapping, Sequence

from samecurve_products.rehearse.emulated_cuda.gpus import AMD, NVIDIA, emulated_machine, id_of

_NUMBER = re.compile(r"\+?(\d+)")


def visible_gpus(environment: Mapping[str, str]) -> tuple[int, ...]:
    """The machine's number of cuda:0, cuda:1, ...; () where all GPUs are hidden."""
    gpus: Sequence[int] = range(int(environment.get("EMULATED_CUDA_DEVICES", "2")))
    vendor = AMD if emulated_machine(environment, AMD).gpus else NVIDIA
    variables = ["CUDA_VISIBLE_DEVICES"]
    if (
        vendor == AMD
    ):  # the runtime below HIP chooses first; HIP reads CUDA's where it has none of its own
        own = "HIP_VISIBLE_DEVICES"
        variables = ["ROCR_VISIBLE_DEVICES", own if environment.get(own) else variables[0]]
    for variable in variables:
        if variable in environment:
            ids = {gpu: id_of(gpu, vendor) for gpu in gpus}
            gpus = _chosen(environment[variable], ids)
    return tuple(gpus)


def _chosen(value: str, ids: Mapping[int, str]) -> Sequence[int]:
    """The GPUs that a variable names, up to its first entry that names none.

    () where it names one twice. ids: of the GPUs among which it chooses
    """
    chosen: list[int] = []
    for entry in value.split(","):
        named = _named(entry.strip(), ids)
        if len(named) != 1:
            break
        chosen += named
    return chosen if len(set(chosen)) == len(chosen) else ()


def _named(entry: str, ids: Mapping[int, str]) -> Sequence[int]:
    """The GPUs of an entry: a number, of which CUDA reads the digits, or how an id begins."""
    if number := _NUMBER.match(entry):
        place = int(number[1])
        return [*ids][place : place + 1]
    return [gpu for gpu, known in ids.items() if entry and known.startswith(entry)]
