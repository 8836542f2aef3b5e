"""A stand-in for the NVIDIA driver's library, under the unmodified pynvml: so many GPUs as COUNT
says. The file that NVML_PROCESSES names lists who uses them: a GPU and a process id a line.
"""

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
static int handles[COUNT];
int nvmlInit_v2(void) { for (int i = 0; i < COUNT; i++) handles[i] = i; return 0; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.00"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { if (index >= COUNT) return 2; *handle = &handles[index]; return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { snprintf(text, size, "NVIDIA H200 no. %d", *(int *)handle); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { snprintf(text, size, "GPU-%d%d-x", *(int *)handle, *(int *)handle); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) { memory->total = 150000000000ULL; memory->used = 1000 * (*(int *)handle + 1); memory->free = memory->total - memory->used; return 0; }
typedef struct { unsigned gpu, memory; } use_t;
int nvmlDeviceGetUtilizationRates(void *handle, use_t *use) { use->gpu = 90 + *(int *)handle; use->memory = 0; return 0; }
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_t *found) {
  char *path = getenv("NVML_PROCESSES"); FILE *file = path ? fopen(path, "r") : NULL; unsigned room = *count, gpu, pid; *count = 0;
  while (file && fscanf(file, "%u %u", &gpu, &pid) == 2)
    if (gpu == (unsigned)*(int *)handle) { if (found && *count < room) found[*count].pid = pid; ++*count; }
  if (file) fclose(file);
  return *count > room ? 7 : 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { *milliwatts = 650500; return *(int *)handle == 1 ? 3 : 0; }
"""


def library(home: Path, count: int) -> Path:
    """The directory to name in LD_LIBRARY_PATH."""
    (home / "nvml.c").write_text(_SOURCE)
    subprocess.run(
        [
            "gcc",
            f"-DCOUNT={count}",
            "-shared",
            "-fPIC",
            "-o",
            home / "libnvidia-ml.so.1",
            home / "nvml.c",
        ],
        check=True,
    )
    return home
