#include "arena.h"

#include "copies.h"
#include "findings.h"
#include "memory.h"
#include "settings.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace emulated {

constexpr size_t kArenaBytes = size_t(1) << 40;  // addresses only; memory comes with the first write

struct Arena {
  int file = -1;
  char* tensors = nullptr;  // what data_ptr() says
  char* kernels = nullptr;  // the same bytes, open
  size_t end = 0;
  std::multimap<size_t, char*> released;
};

static bool forked_child = false;
bool is_forked_child() { return forked_child; }

static char* map_arena(int file, int access) {
  void* at = mmap(nullptr, kArenaBytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(at != MAP_FAILED, "the emulated devices find no address space: ", strerror(errno));
  madvise(at, kArenaBytes, MADV_DONTFORK);
  madvise(at, kArenaBytes, MADV_DONTDUMP);
  return static_cast<char*>(at);
}

static Arena* made = nullptr;

static Arena* make_arena() {
  auto* fresh = new Arena();
  fresh->file = memfd_create("emulated-cuda", MFD_CLOEXEC);
  TORCH_CHECK(fresh->file >= 0 && ftruncate(fresh->file, kArenaBytes) == 0,
              "the emulated devices get no memory: ", strerror(errno));
  const char* protect = std::getenv("EMULATED_CUDA_PROTECT");
  const bool open = protect && std::strcmp(protect, "0") == 0;
  fresh->tensors = map_arena(fresh->file, open ? PROT_READ | PROT_WRITE : PROT_NONE);
  fresh->kernels = map_arena(fresh->file, PROT_READ | PROT_WRITE);
  return fresh;
}

// A child gets none of its parent's memory: it begins with an arena of its own where the parent
// had used no device, and may use none where it had.
static void begin_child() {
  if (made->end == 0) made = make_arena();
  else forked_child = true;
}

static Arena& arena() {
  static std::once_flag once;
  std::call_once(once, [] {
    made = make_arena();
    pthread_atfork(nullptr, nullptr, begin_child);
  });
  return *made;
}

bool is_device_address(const void* address) {
  const auto* at = static_cast<const char*>(address);
  return at >= arena().tensors && at < arena().tensors + kArenaBytes;
}

char* kernel_view(const void* address) {
  auto* at = const_cast<char*>(static_cast<const char*>(address));
  return is_device_address(at) ? arena().kernels + (at - arena().tensors) : at;
}

char* reserve_segment(size_t bytes) {
  auto& space = arena();
  const auto reusable = space.released.find(bytes);
  if (reusable != space.released.end()) {
    char* segment = reusable->second;
    space.released.erase(reusable);
    return segment;
  }
  TORCH_CHECK(space.end + bytes <= kArenaBytes, "the emulated devices have no addresses left");
  char* segment = space.tensors + space.end;
  space.end += bytes;
  return segment;
}

void release_segment(char* segment, size_t bytes) {
  const auto offset = segment - arena().tensors;
  fallocate(arena().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
            static_cast<off_t>(bytes));
  arena().released.emplace(bytes, segment);
}

void poison(char* device_address, size_t bytes) {
  if (bytes) std::memset(kernel_view(device_address), kPoison, bytes);
}

static struct sigaction before;

// The access runs again after this, and ends the process as ever. faulthandler, which was enabled
// after the emulator, hands the signal back to it: the second time nobody is asked.
static void on_bad_address(int, siginfo_t* info, void*) {
  if (note_early_access(static_cast<char*>(info->si_addr))) return;  // the access goes on
  static bool was_here = false;
  if (was_here) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  was_here = true;
  sigaction(SIGSEGV, &before, nullptr);
  if (!is_device_address(info->si_addr)) return;
  const auto device = std::to_string(device_of_address(static_cast<char*>(info->si_addr)));
  add_finding("host_read", "the host read memory of cuda:" + device +
                  "; copy the tensor first: tensor.cpu()", here(), {}, true);
}

void watch_host_reads() {
  arena();
  struct sigaction now, ours;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bad_address) return;
  std::memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = on_bad_address;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &before);
}

}  // namespace emulated
