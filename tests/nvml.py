"""A stand-in for the NVIDIA driver's library, under the unmodified pynvml.

So many GPUs as COUNT says. The file that NVML_PROCESSES names lists who uses them: a GPU and a
process id a line.
"""

import subprocess
from pathlib import Path

# engines built for it, in the place of those that are installed, for the head of a program
ENGINES = """
from samecurve.probe import engines
engines.torch_build = lambda: engines.TorchBuild("2.13.0", "13.0", None)
engines.jax_plugins = lambda: ["xla_cuda13"]
"""

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilisation_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;

static int handles[COUNT];  /* each holds its own index */

static int index_of(void *handle) { return *(int *)handle; }

int nvmlInit_v2(void) {
  for (int index = 0; index < COUNT; index++) handles[index] = index;
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code) { return "error"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, "580.00");
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = COUNT;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if (index >= COUNT) return INVALID_ARGUMENT;
  *handle = &handles[index];
  return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
  snprintf(text, size, "NVIDIA H200 no. %d", index_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
  snprintf(text, size, "GPU-%d%d-x", index_of(handle), index_of(handle));
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
  memory->total = 150000000000ULL;
  memory->used = 1000 * (index_of(handle) + 1);
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, utilisation_t *utilisation) {
  utilisation->gpu = 90 + index_of(handle);
  utilisation->memory = 0;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *processes) {
  char *path = getenv("NVML_PROCESSES");
  FILE *file = path ? fopen(path, "r") : NULL;
  unsigned room = *count, gpu, pid;
  *count = 0;
  while (file && fscanf(file, "%u %u", &gpu, &pid) == 2) {
    if (gpu != (unsigned)index_of(handle)) continue;
    if (processes && *count < room) processes[*count].pid = pid;
    ++*count;
  }
  if (file) fclose(file);
  return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  *milliwatts = 650500;
  return index_of(handle) == 1 ? NOT_SUPPORTED : SUCCESS;
}
"""


def library(home: Path, count: int) -> Path:
    """The directory to name in LD_LIBRARY_PATH."""
    source, target = home / "nvml.c", home / "libnvidia-ml.so.1"
    source.write_text(_SOURCE)
    command = ["gcc", f"-DCOUNT={count}", "-shared", "-fPIC", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return home
