// The Python module emulated_cuda_native.
#include "arena.h"
#include "counts.h"
#include "deterministic.h"
#include "faults.h"
#include "findings.h"
#include "generators.h"
#include "hooks.h"
#include "kernel_call.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

#include <torch/csrc/utils/pybind.h>

namespace emulated {

namespace py = pybind11;

static py::dict as_dict(const Stat& stat) {
  py::dict made;
  made["current"] = stat.current;
  made["peak"] = stat.peak;
  made["allocated"] = stat.allocated;
  made["freed"] = stat.freed;
  return made;
}

// The form of torch._C._cuda_memoryStats.
static py::dict stats_as_dict(int device) {
  const auto stats = memory_stats(device);
  py::dict made;
  for (const auto* name : {"allocation", "segment", "active", "inactive_split", "allocated_bytes",
                           "reserved_bytes", "active_bytes", "inactive_split_bytes",
                           "requested_bytes"}) {
    const auto found = stats.by_name.find(name);
    const auto pools = found == stats.by_name.end() ? PoolStats{} : found->second;
    py::dict by_pool;
    by_pool["all"] = as_dict(pools[0]);
    by_pool["large_pool"] = as_dict(pools[1]);
    by_pool["small_pool"] = as_dict(pools[2]);
    made[name] = by_pool;
  }
  for (const auto* name : {"num_alloc_retries", "num_ooms", "num_sync_all_streams",
                           "num_device_alloc", "num_device_free"}) {
    const auto found = stats.numbers.find(name);
    made[name] = found == stats.numbers.end() ? 0 : found->second;
  }
  made["max_split_size"] = -1;
  made["oversize_allocations"] = as_dict(Stat{});
  made["oversize_segments"] = as_dict(Stat{});
  return made;
}

static py::tuple memory(int device) {
  const auto stats = memory_stats(device);
  const auto found = stats.by_name.find("allocated_bytes");
  const auto used = found == stats.by_name.end() ? Stat{} : found->second[0];
  return py::make_tuple(used.current, used.peak, memory_limit(device));
}

static py::dict counts_as_dict() {
  const auto all = counts();
  py::dict made;
  made["ops"] = all.operations;
  made["syncs"] = all.syncs;
  made["races"] = findings_made();
  made["h2d"] = all.from_host;
  made["h2d_pageable"] = all.from_pageable_host;
  made["d2h"] = all.to_host;
  made["by_op"] = all.calls;
  made["launches"] = all.launches;
  made["bytes"] = all.bytes;
  made["by_sync"] = all.syncs_by_kind;
  made["sync_at"] = all.syncs_by_line;
  made["allocs"] = all.allocations;
  return made;
}

static py::list reports() {
  py::list made;
  for (const auto& finding : findings()) {
    py::dict row;
    row["kind"] = finding.kind;
    row["text"] = finding.text;
    row["here"] = finding.here;
    row["there"] = finding.there;
    row["times"] = finding.times;
    made.append(row);
  }
  return made;
}

static void found(const std::string& kind, const std::string& text, const Place& place) {
  add_finding(kind, text, place);
}

static int exchange_device(int device) {
  const int before = current_device();
  set_current_device(device);
  return before;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("watch_host_reads", &watch_host_reads);
  module.def("device_count", &device_count);
  module.def("show_devices", &show_devices);
  module.def("get_device", &current_device);
  module.def("set_device", &set_current_device);
  module.def("exchange_device", &exchange_device);
  module.def("generator", [](int device) { return default_generator(device); });

  module.def("memory", &memory);
  module.def("memory_stats", &stats_as_dict);
  module.def("memory_reserved", &memory_reserved);
  module.def("reset_peak", &reset_peak);
  module.def("reset_accumulated", &reset_accumulated);
  module.def("set_memory_fraction", &set_memory_fraction);
  module.def("empty_cache", &empty_cache);
  module.def("resize_storage", [](const at::Tensor& tensor, int64_t bytes) {
    resize_storage(tensor.storage().unsafeGetStorageImpl(), static_cast<size_t>(bytes));
  });

  module.def("set_nondeterministic", &set_nondeterministic);

  module.def("fail_device", &fail_device);
  module.def("take_memory", &take_memory);

  module.def("host_view", &host_view);
  module.def("touch", &touch_tensor);
  module.def("count", &start_counting, py::arg("on"), py::arg("lines") = true);
  module.def("counts", &counts_as_dict);
  module.def("reports", &reports);
  py::class_<Place>(module, "Place");  // the Python lines of a call, taken by here()
  module.def("here", &here);
  module.def("found", &found);
  module.def("set_sync_debug_mode", &set_sync_debug_mode);
  module.def("get_sync_debug_mode", &sync_debug_mode);
}

}  // namespace emulated
