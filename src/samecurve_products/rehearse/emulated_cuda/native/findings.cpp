#include <Python.h>

#include "findings.h"
#include "forward_lines.h"
#include "settings.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <unordered_map>

namespace emulated {

struct Code {
  PyCodeObject* object;
  std::string file, function;
  bool is_torchs;
};

// torch runs its operators without the GIL. A thread's own frames stand still meanwhile, so they
// are read without it: no object is made, and a code object is kept alive for ever instead of
// being counted. (An added count that another thread overwrites is lost, never one of its own.)
static const Code* code_of(PyCodeObject* object) {
  static auto* guard = new std::mutex();
  static auto* known = new std::unordered_map<PyCodeObject*, const Code*>();
  std::lock_guard<std::mutex> lock(*guard);
  auto& code = (*known)[object];
  if (code) return code;
  constexpr Py_ssize_t for_ever = 1000;
  __atomic_fetch_add(&reinterpret_cast<PyObject*>(object)->ob_refcnt, for_ever, __ATOMIC_SEQ_CST);
  const char* file = PyUnicode_AsUTF8(object->co_filename);
  const char* function = PyUnicode_AsUTF8(object->co_name);
  std::string path = file ? file : "?";
  const bool torchs = path.find("site-packages/torch/") != std::string::npos;
  const bool ours = path.find("rehearse/emulated_cuda/") != std::string::npos;
  code = new Code{object, path, function ? function : "?", torchs || ours};
  return code;
}

static void add_frame(Place& place, PyCodeObject* object, int instruction) {
  const Code* code = code_of(object);
  if (!code->is_torchs || place.count == 0) place.frames[place.count++] = {code, instruction};
}
static bool is_full(const Place& place) {
  return place.count == static_cast<int>(place.frames.size());
}
constexpr int kDeepest = 80;

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
struct InterpreterFrame {  // Python 3.11's _PyInterpreterFrame, Include/internal/pycore_frame.h
  void *function, *globals, *builtins, *locals;
  PyCodeObject* code;
  void* object;
  InterpreterFrame* previous;
  const uint16_t* instruction;
};

static Place python_lines() {
  Place place;
  if (!Py_IsInitialized()) return place;
  const PyThreadState* thread = PyGILState_GetThisThreadState();
  if (!thread || !thread->cframe) return place;
  auto* frame = reinterpret_cast<InterpreterFrame*>(thread->cframe->current_frame);
  for (int depth = 0; frame && depth < kDeepest && !is_full(place); ++depth) {
    const auto* first = reinterpret_cast<const uint16_t*>(frame->code->co_code_adaptive);
    const auto instruction = static_cast<int>(frame->instruction - first) * 2;
    if (instruction >= 0) add_frame(place, frame->code, instruction);
    frame = frame->previous;
  }
  return place;
}
#else
static Place python_lines() {
  Place place;
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return place;
  const auto gil = PyGILState_Ensure();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame && depth < kDeepest && !is_full(place); ++depth) {
    PyCodeObject* object = PyFrame_GetCode(frame);
    add_frame(place, object, PyFrame_GetLasti(frame));
    Py_DECREF(object);
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return place;
}
#endif

Place here() {
  const Place place = python_lines();
  return place.count ? place : forward_of_this_node();
}

static std::string line_of(const Place& place, int number) {
  const auto& [code, instruction] = place.frames[number];
  const int line = PyCode_Addr2Line(code->object, instruction);
  const auto text = code->file + ":" + std::to_string(line) + " in " + code->function;
  return place.is_backward ? text + " (its backward pass)" : text;
}

std::string users_line(const Place& place) {
  for (int i = 0; i < place.count; ++i)
    if (!place.frames[i].code->is_torchs) return line_of(place, i);
  return "";
}

std::vector<std::string> lines(const Place& place) {
  std::vector<std::string> text;
  for (int i = 0; i < place.count; ++i) text.push_back(line_of(place, i));
  if (text.empty()) text.push_back("(no Python line: a thread of torch, such as the backward pass)");
  return text;
}

static std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const unsigned char letter : text) {
    if (letter == '"' || letter == '\\') {
      out += '\\';
      out += static_cast<char>(letter);
    } else if (letter < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", letter);
      out += escape;
    } else {
      out += static_cast<char>(letter);
    }
  }
  return out + "\"";
}

static std::string quoted(const std::vector<std::string>& texts) {
  std::string out = "[";
  for (const auto& text : texts) out += (out.size() > 1 ? ", " : "") + quoted(text);
  return out + "]";
}

static void write_whole(int file, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const auto wrote = ::write(file, text.data() + done, text.size() - done);
    if (wrote <= 0) return;  // a full disk: the finding is still in memory and on stderr
    done += static_cast<size_t>(wrote);
  }
}

static void append_to_report(const Finding& finding) {
  if (!report_folder()) return;
  const auto path = std::string(report_folder()) + "/" + std::to_string(getpid()) + ".jsonl";
  const int file = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (file < 0) return;
  write_whole(file, "{\"row\": \"finding\", \"kind\": " + quoted(finding.kind) + ", \"text\": " +
                        quoted(finding.text) + ", \"here\": " + quoted(finding.here) +
                        ", \"there\": " + quoted(finding.there) + "}\n");
  ::close(file);
}

static void print(const Finding& finding) {
  std::string text = "emulated CUDA: " + finding.kind + ": " + finding.text + "\n";
  for (const auto& line : finding.here) text += "    " + line + "\n";
  if (!finding.there.empty()) text += "  and\n";
  for (const auto& line : finding.there) text += "    " + line + "\n";
  write_whole(STDERR_FILENO, text);
}

static std::map<std::string, Finding>& table() {
  static auto* made = new std::map<std::string, Finding>();
  return *made;
}
static int64_t made_in_all = 0;

void add_finding(const std::string& kind, const std::string& text, const Place& here,
                 const Place& there, bool always_print) {
  constexpr size_t kept = 500;
  Finding finding{kind, text, lines(here), {}};
  if (there.count) finding.there = lines(there);
  Lock lock(state_mutex());
  ++made_in_all;
  auto key = kind + quoted(finding.here) + quoted(finding.there);
  if (!here.count) key += text;  // else all of the backward pass would be one finding
  auto seen = table().find(key);
  if (seen != table().end()) {
    ++seen->second.times;
    return;
  }
  if (table().size() >= kept) return;
  append_to_report(finding);
  if (is_loud() || always_print) print(finding);
  table().emplace(key, std::move(finding));
}

std::vector<Finding> findings() {
  Lock lock(state_mutex());
  std::vector<Finding> all;
  for (const auto& [key, finding] : table()) all.push_back(finding);
  return all;
}

int64_t findings_made() {
  Lock lock(state_mutex());
  return made_in_all;
}

}  // namespace emulated
