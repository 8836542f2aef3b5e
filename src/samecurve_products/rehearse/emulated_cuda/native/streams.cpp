#include "streams.h"

#include "copies.h"
#include "counts.h"
#include "faults.h"
#include "findings.h"
#include "memory.h"
#include "settings.h"

#include <atomic>
#include <chrono>

namespace emulated {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

static thread_local c10::StreamId chosen_stream[kMaxDevices] = {};
static std::atomic<unsigned> next_in_pool[kMaxDevices];

StreamKey current_stream(int device) {
  return device * kStreamsPerDevice + static_cast<int>(chosen_stream[device]);
}
StreamKey key_of(const Stream& stream) {
  return with_index(stream.device()).index() * kStreamsPerDevice + static_cast<int>(stream.id());
}
int device_of(StreamKey stream) { return stream / kStreamsPerDevice; }
std::string name_of(StreamKey stream) {
  const int number = stream % kStreamsPerDevice;
  const auto device = "cuda:" + std::to_string(device_of(stream));
  return number ? "stream " + std::to_string(number) + " of " + device
                : "the default stream of " + device;
}

static Clock& clock_of(StreamKey stream) {
  static auto* clocks = new std::vector<Clock>(emulated_devices() * kStreamsPerDevice);
  auto& clock = (*clocks)[stream];
  if (clock.empty()) clock.resize(emulated_devices() * kStreamsPerDevice);
  return clock;
}
static Clock& host_clock() {
  static auto* clock = new Clock(emulated_devices() * kStreamsPerDevice);
  return *clock;
}
static void merge(Clock& into, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (other[i] > into[i]) into[i] = other[i];
}

uint64_t tick(StreamKey stream) { return ++clock_of(stream)[stream]; }
uint64_t time_of(StreamKey stream) { return clock_of(stream)[stream]; }
bool host_has_waited(StreamKey stream, uint64_t time) { return host_clock()[stream] >= time; }
bool is_ordered(StreamKey after, StreamKey before, uint64_t time) {
  return after == before || clock_of(after)[before] >= time || host_has_waited(before, time);
}
void wait_for_stream(StreamKey waits, StreamKey awaited) {
  merge(clock_of(waits), clock_of(awaited));
}
void host_waits_for(StreamKey stream) { merge(host_clock(), clock_of(stream)); }

static std::atomic<int> debug_mode{0};
void set_sync_debug_mode(int mode) { debug_mode = mode; }
int sync_debug_mode() { return debug_mode; }

void note_host_sync(const char* what, bool debug_mode_objects) {
  settle_late_copies();
  count_sync(what);
  if (!debug_mode_objects) return;
  if (debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  TORCH_CHECK(debug_mode != 2, "called a synchronizing CUDA operation");
}

// An event holds the clock of its stream when it was recorded. It is done once the host has
// waited for that work; a host that only asks gets its yes at the third question.
struct Event {
  Clock seen;
  StreamKey stream = -1;
  int questions = 0;
  std::chrono::steady_clock::time_point at;
};
constexpr int kQuestionsUntilDone = 3;

static bool is_done(const Clock& seen) {
  for (size_t i = 0; i < seen.size(); ++i)
    if (seen[i] > host_clock()[i]) return false;
  return true;
}

static bool answer(const Clock& seen, int& questions) {
  {
    Lock lock(state_mutex());
    if (!is_done(seen) && ++questions < kQuestionsUntilDone) return false;
    merge(host_clock(), seen);
    questions = 0;
  }
  settle_late_copies();
  return true;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kCuda, static_cast<DeviceIndex>(current_device()));
  }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() < device_count()) set_current_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }

  Stream getStream(Device device) const override {
    device = with_index(device);
    return Stream(Stream::UNSAFE, device, chosen_stream[device.index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, with_index(device), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    device = with_index(device);
    const auto turn = next_in_pool[device.index()]++ % (kStreamsPerDevice - 1);
    return Stream(Stream::UNSAFE, device, 1 + turn);
  }
  Stream getNewStream(Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  Stream exchangeStream(Stream stream) const override {
    const auto device = with_index(stream.device());
    const auto before = getStream(device);
    chosen_stream[device.index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  bool queryStream(const Stream& stream) const override {
    static auto* questions = new std::vector<int>(emulated_devices() * kStreamsPerDevice);
    Clock now;
    {
      Lock lock(state_mutex());
      now = clock_of(key_of(stream));
    }
    return answer(now, (*questions)[key_of(stream)]);
  }
  void synchronizeStream(const Stream& stream) const override {
    check_device(stream.device_index());
    {
      Lock lock(state_mutex());
      host_waits_for(key_of(stream));
    }
    note_host_sync("stream.synchronize", true);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    check_device(device);
    {
      Lock lock(state_mutex());
      for (int number = 0; number < kStreamsPerDevice; ++number)
        host_waits_for(device * kStreamsPerDevice + number);
    }
    note_host_sync("device.synchronize", false);
  }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    Lock lock(state_mutex());
    if (!*event) *event = new Event();
    auto& recorded = *static_cast<Event*>(*event);
    recorded.stream = key_of(stream);
    recorded.seen = clock_of(recorded.stream);
    recorded.questions = 0;
    recorded.at = std::chrono::steady_clock::now();
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Lock lock(state_mutex());
    merge(clock_of(key_of(stream)), static_cast<Event*>(event)->seen);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& asked = *static_cast<Event*>(event);
    return answer(asked.seen, asked.questions);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const StreamKey recorded = static_cast<Event*>(event)->stream;
    if (recorded >= 0) check_device(static_cast<DeviceIndex>(recorded / kStreamsPerDevice));
    {
      Lock lock(state_mutex());
      merge(host_clock(), static_cast<Event*>(event)->seen);
    }
    note_host_sync("event.synchronize", false);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    const auto passed = static_cast<Event*>(end)->at - static_cast<Event*>(start)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (auto* block = block_of(data)) record_use(*block, key_of(stream));
  }
};

c10::impl::DeviceGuardImplInterface* device_guard() {
  static auto* guard = new Guard();
  return guard;
}

}  // namespace emulated
