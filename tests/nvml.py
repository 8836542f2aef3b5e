"""A stand-in for the NVIDIA driver's library, under the unmodified pynvml.

So many GPUs as COUNT says, or as many as the file that NVML_GPUS names has lines, each a Gpu. The
file is read anew whenever a program begins to ask. The file that NVML_PROCESSES names lists who
uses them: a GPU and a process id a line.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

# engines built for it, in the place of those that are installed, for the head of a program
ENGINES = """
from samecurve.probe import engines
engines.torch_build = lambda: engines.TorchBuild("2.13.0", "13.0", None)
engines.jax_plugins = lambda: ["xla_cuda13"]
"""


@dataclass(frozen=True)
class Gpu:
    """A line of NVML_GPUS."""

    name: str = "NVIDIA H200"
    memory: int = 150_000_000_000  # bytes; 0: it does not tell
    used: int = 1000
    mode: int = 0  # 1: exclusive thread, 2: prohibited, 3: exclusive process
    errors: int = 0  # that were not corrected
    slowdowns: int = 0  # bits
    lanes: int = 16  # of 16
    peers: int = 1  # whether others read its memory
    lost: int = 0  # off the bus


def write_gpus(path: Path, gpus: Sequence[Gpu]) -> None:
    path.write_text("".join("|".join(map(str, astuple(gpu))) + "\n" for gpu in gpus))


_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, LOST = 15 };
enum { MOST = 64 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
} pci_t;
typedef struct {
  char name[64];
  unsigned long long memory, used, errors, slowdowns;
  int mode, lanes, peers, lost;
} gpu_t;

static int count, handles[MOST];  /* each handle holds its own index */
static gpu_t gpus[MOST];

static int index_of(void *handle) { return *(int *)handle; }

static gpu_t *gpu_of(void *handle) { return &gpus[index_of(handle)]; }

int nvmlInit_v2(void) {
  char *path = getenv("NVML_GPUS"), line[256];
  FILE *file = path ? fopen(path, "r") : NULL;
  for (int index = 0; index < MOST; index++) handles[index] = index;
  for (count = 0; file && count < MOST && fgets(line, sizeof line, file); count++) {
    gpu_t *gpu = &gpus[count];
    sscanf(line, "%63[^|]|%llu|%llu|%d|%llu|%llu|%d|%d|%d", gpu->name, &gpu->memory, &gpu->used,
           &gpu->mode, &gpu->errors, &gpu->slowdowns, &gpu->lanes, &gpu->peers, &gpu->lost);
  }
  if (file) fclose(file);
  for (; !path && count < COUNT; count++) {
    gpu_t gpu = {"", 150000000000ULL, 1000 * (count + 1), 0, 0, 0, 16, 1, 0};
    snprintf(gpu.name, sizeof gpu.name, "NVIDIA H200 no. %d", count);
    gpus[count] = gpu;
  }
  return getenv("NVML_FAULT") ? atoi(getenv("NVML_FAULT")) : SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return "error"; }

int nvmlDeviceGetCount_v2(unsigned *number) {
  *number = count;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index >= (unsigned)count) return INVALID_ARGUMENT;
  *handle = &handles[index];
  return gpus[index].lost ? LOST : SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  snprintf(text, size, "%s", gpu_of(handle)->name);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
  memory->total = gpu_of(handle)->memory;
  memory->used = gpu_of(handle)->used;
  memory->free = memory->total - memory->used;
  return memory->total ? SUCCESS : NOT_SUPPORTED;
}

#ifndef OLD  /* what a driver of long ago lacks, or a small one */

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "580.00");
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = getenv("NVML_CUDA") ? atoi(getenv("NVML_CUDA")) : 13000;
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-%d%d-x", index_of(handle), index_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilisation_t *utilisation) {
  utilisation->gpu = 90 + index_of(handle);
  utilisation->memory = 0;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *number, process_t *processes) {
  char *path = getenv("NVML_PROCESSES");
  FILE *file = path ? fopen(path, "r") : NULL;
  unsigned room = *number, gpu, pid;
  *number = 0;
  while (file && fscanf(file, "%u %u", &gpu, &pid) == 2) {
    if (gpu != (unsigned)index_of(handle)) continue;
    if (processes && *number < room) {
      processes[*number].pid = pid;
      processes[*number].used = gpu_of(handle)->used;
    }
    ++*number;
  }
  if (file) fclose(file);
  return *number > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  *milliwatts = 650500;
  return index_of(handle) == 1 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetComputeMode(void *handle, int *mode) {
  *mode = gpu_of(handle)->mode;
  return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int since, unsigned long long *errors) {
  *errors = gpu_of(handle)->errors;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
  *reasons = gpu_of(handle)->slowdowns;
  return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *lanes) {
  *lanes = gpu_of(handle)->lanes;
  return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *lanes) {
  *lanes = 16;
  return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
  snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", 0x3B + index_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *one, void *other, int what, int *status) {
  *status = what == 0 && gpu_of(one)->peers && gpu_of(other)->peers ? 0 : 5;
  return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, int *level) {
  *level = 30;
  return SUCCESS;
}

#endif
"""


def library(home: Path, count: int = 0, *, old: bool = False) -> Path:
    """The directory to name in LD_LIBRARY_PATH. old: it lacks what older drivers lack."""
    source, target = home / "nvml.c", home / "libnvidia-ml.so.1"
    source.write_text(_SOURCE)
    flags = [f"-DCOUNT={count}", *(["-DOLD"] if old else [])]
    command = ["gcc", *flags, "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return home
