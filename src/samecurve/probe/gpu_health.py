"""What goes wrong with NVIDIA's GPUs while a run uses them. AMD's drivers are not asked."""

from collections.abc import Collection, Sequence
from typing import Any

import pynvml

from samecurve.probe.gpu_state import slowdowns, uncorrected_errors
from samecurve.units import counted, join_words


class GpuHealth:
    """Finds new errors of memory, clocks that are held down, and GPUs that the driver has lost.

    A fault is told once; errors of memory again when there are more.

    handles: the driver's, of each GPU that the program sees
    """

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles
        self._errors = [uncorrected_errors(handle) or 0 for handle in handles]
        self._slowdowns: list[set[str]] = [set() for _ in handles]
        self._lost: set[int] = set()

    def new_faults(self, indices: Collection[int]) -> list[tuple[int, str]]:
        """The faults since the last call: (index of the GPU, what is wrong and the remedy).

        indices: of the GPUs to look at
        """
        faults = []
        for index in sorted(set(indices)):
            if index < len(self._handles) and index not in self._lost:
                faults += [(index, text) for text in self._new_faults_of(index)]
        return faults

    def _new_faults_of(self, index: int) -> list[str]:
        handle, texts = self._handles[index], []
        if why := _why_lost(handle):
            self._lost.add(index)
            return [
                f"the driver has lost it ({why}): restart the machine (`dmesg | grep Xid` says"
                " what happened)"
            ]
        errors = uncorrected_errors(handle) or 0
        if errors > self._errors[index]:
            texts.append(
                f"{counted(errors - self._errors[index], 'new error')} in its memory could not be"
                " corrected, so results may be wrong: stop the run, reset the GPU (`sudo nvidia-smi"
                " --gpu-reset`), and let `samecurve audit RUN` compute steps since then once more"
            )
        self._errors[index] = errors
        if new := set(slowdowns(handle)) - self._slowdowns[index]:
            self._slowdowns[index] |= new
            texts.append(
                f"its clock is held down, and all devices wait for the slowest:"
                f" {join_words(sorted(new))}; look at fans, air flow and power cables"
            )
        return texts


def _why_lost(handle: Any) -> str:
    """Why the driver does not reach a GPU, in its words; '': it does."""
    try:
        pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            return str(error)
    return ""
