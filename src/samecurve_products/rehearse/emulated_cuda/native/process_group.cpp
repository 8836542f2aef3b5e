// What torch needs in C++ of a process group that is written in Python (../nccl.py).
//
// torch cannot derive a Backend or a Work in Python so that C++ callers (DDP's reducer, the functional
// collectives, `ProcessGroup`) reach all of its methods. The three classes here pass each call on.
// The file is a Python module of its own, `emulated_cuda_process_group`.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <pybind11/chrono.h>
#include <torch/extension.h>

#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

namespace emulated_cuda {

#if PY_VERSION_HEX >= 0x030D0000
inline bool is_finalizing() { return Py_IsFinalizing(); }
#else
inline bool is_finalizing() { return _Py_IsFinalizing(); }
#endif

using c10d::Backend;
using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using Sizes = std::vector<int64_t>;
using Milliseconds = std::chrono::milliseconds;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// A pending collective; `pending` is the Python object that knows its state.
class PendingWork final : public c10d::Work {
 public:
  PendingWork(int rank, OpType type, py::object pending)
      : Work(rank, type), pending_(std::move(pending)) {}

  ~PendingWork() override {
    if (!Py_IsInitialized()) {
      pending_.release();  // the interpreter has freed the object already
      return;
    }
    py::gil_scoped_acquire gil;
    pending_ = py::object();
  }

  bool wait(Milliseconds timeout = kNoTimeout) override { return ask<bool>("wait", timeout); }
  void synchronize() override { ask<bool>("wait", kNoTimeout); }
  bool isCompleted() override { return ask<bool>("is_completed"); }
  bool isSuccess() const override { return ask<bool>("is_success"); }
  void abort() override { ask<bool>("abort"); }
  Tensors result() override { return ask<Tensors>("result"); }
  uint64_t getSequencenumber() const override { return ask<uint64_t>("sequence_number"); }
  float getDuration() const override { return ask<float>("duration"); }

  std::exception_ptr exception() const override {
    auto text = ask<std::string>("failure");
    if (text.empty()) return nullptr;
    return std::make_exception_ptr(std::runtime_error(text));
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future("get_future"); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return future("get_future_result");
  }

 private:
  template <typename Answer, typename... Arguments>
  Answer ask(const char* name, Arguments&&... arguments) const {
    py::gil_scoped_acquire gil;
    return pending_.attr(name)(std::forward<Arguments>(arguments)...).template cast<Answer>();
  }

  c10::intrusive_ptr<c10::ivalue::Future> future(const char* name) const {
    py::gil_scoped_acquire gil;
    using Wrapper = std::shared_ptr<torch::jit::PythonFutureWrapper>;
    return pending_.attr(name)().cast<Wrapper>()->fut;
  }

  py::object pending_;
};

// ProcessGroupNCCL.Options; Python adds the fields that only it reads.
struct NcclOptions final : Backend::Options {
  NcclOptions() : Options("nccl", Milliseconds(10 * 60 * 1000)) {}
};

// A backend that a Python class derives. Each virtual method calls the Python method of its name.
class PythonBackend : public Backend {
 public:
  PythonBackend(int rank, int size, std::string name)
      : Backend(rank, size), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsSplitting() const override { return name_ == "nccl"; }
  bool supportsCoalescing() const override { return name_ == "nccl"; }

  c10::intrusive_ptr<Backend::Options> getBackendOptions() override {
    return ask<c10::intrusive_ptr<NcclOptions>>("options_of_group");
  }
  void setTimeout(Milliseconds timeout) override { tell("_set_default_timeout", timeout); }
  void startCoalescing() override { tell("start_coalescing"); }
  WorkPointer endCoalescing() override { return work(OpType::COALESCED, "end_coalescing"); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return work(OpType::BROADCAST, "broadcast", tensors, options);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return work(OpType::ALLREDUCE, "allreduce", tensors, options);
  }
  WorkPointer allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return work(OpType::COALESCED, "allreduce_coalesced", tensors, options);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return work(OpType::REDUCE, "reduce", tensors, options);
  }
  WorkPointer allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return work(OpType::ALLGATHER, "allgather", outputs, inputs, options);
  }
  WorkPointer _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return work(OpType::_ALLGATHER_BASE, "_allgather_base", output, input, options);
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return work(
        OpType::COALESCED, "allgather_into_tensor_coalesced", outputs, inputs, options);
  }
  WorkPointer gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return work(OpType::GATHER, "gather", outputs, inputs, options);
  }
  WorkPointer scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return work(OpType::SCATTER, "scatter", outputs, inputs, options);
  }
  WorkPointer reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    return work(OpType::REDUCE_SCATTER, "reduce_scatter", outputs, inputs, options);
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return work(OpType::_REDUCE_SCATTER_BASE, "_reduce_scatter_base", output, input, options);
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return work(
        OpType::COALESCED, "reduce_scatter_tensor_coalesced", outputs, inputs, options);
  }
  WorkPointer alltoall_base(
      at::Tensor& output, at::Tensor& input, Sizes& output_sizes, Sizes& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return work(
        OpType::ALLTOALL_BASE, "alltoall_base", output, input, output_sizes, input_sizes, options);
  }
  WorkPointer alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return work(OpType::ALLTOALL, "alltoall", outputs, inputs, options);
  }
  WorkPointer send(Tensors& tensors, int rank, int tag) override {
    return work(OpType::SEND, "send", tensors, rank, tag);
  }
  WorkPointer recv(Tensors& tensors, int rank, int tag) override {
    return work(OpType::RECV, "recv", tensors, rank, tag);
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    return work(OpType::BARRIER, "barrier", options);
  }

  void setSequenceNumberForGroup() override {}  // NCCL's starts at 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return ask<uint64_t>("sequence_number"); }
  void eagerConnectSingleDevice(at::Device device) override { tell("connect", device); }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Backend::Options>& options) override {
    return ask<c10::intrusive_ptr<Backend>>("split", store, ranks, options);
  }
  void abort() override { tell("abort"); }
  void shutdown() override { tell("shutdown"); }

 private:
  template <typename Answer, typename... Arguments>
  Answer ask(const char* name, Arguments&&... arguments) const {
    py::gil_scoped_acquire gil;
    auto method = py::get_override(this, name);
    TORCH_CHECK(method, "Backend ", name_, " does not support ", name);
    return method(std::forward<Arguments>(arguments)...).template cast<Answer>();
  }

  template <typename... Arguments>
  void tell(const char* name, Arguments&&... arguments) const {
    py::gil_scoped_acquire gil;
    ask<py::object>(name, std::forward<Arguments>(arguments)...);  // freed while the GIL is held
  }

  template <typename... Arguments>
  WorkPointer work(OpType type, const char* name, Arguments&&... arguments) const {
    py::gil_scoped_acquire gil;
    py::object pending = ask<py::object>(name, std::forward<Arguments>(arguments)...);
    if (pending.is_none()) return {};  // a part of a batch that is still open
    if (py::isinstance<c10d::Work>(pending)) return pending.cast<WorkPointer>();
    return c10::make_intrusive<PendingWork>(getRank(), type, std::move(pending));
  }

  std::string name_;
};

// Waits for all of them. The interpreter may end meanwhile: its threads must not come back to it, for
// the exception that then ends a thread may not pass through C++.
void wait_all(const std::vector<WorkPointer>& works) {
  std::exception_ptr failure;
  auto* state = PyEval_SaveThread();
  try {
    for (const auto& work : works) work->wait();
  } catch (...) {
    failure = std::current_exception();
  }
  while (is_finalizing()) pause();
  PyEval_RestoreThread(state);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace emulated_cuda

PYBIND11_MODULE(emulated_cuda_process_group, module) {
  using emulated_cuda::PythonBackend;
  using emulated_cuda::NcclOptions;
  py::module_::import("torch.distributed");  // registers the base classes
  py::class_<NcclOptions, c10d::Backend::Options, c10::intrusive_ptr<NcclOptions>>(
      module, "Options", py::dynamic_attr())
      .def(py::init<>())
      .def_readwrite("timeout", &NcclOptions::timeout)
      .def_readwrite("_timeout", &NcclOptions::timeout)
      .def_readwrite("group_name", &NcclOptions::group_name)
      .def_readwrite("group_desc", &NcclOptions::group_desc)
      .def_readwrite("global_ranks_in_group", &NcclOptions::global_ranks_in_group);
  py::class_<PythonBackend, c10d::Backend, c10::intrusive_ptr<PythonBackend>>(
      module, "PythonBackend")
      .def(py::init<int, int, std::string>())
      .def_property_readonly("group_description", &PythonBackend::getGroupDesc)
      .def_property_readonly("group_uid", &PythonBackend::getGroupUid);
  module.def("wait_all", &emulated_cuda::wait_all);
}
