#include <Python.h>

#include "findings.h"
#include "settings.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <unordered_map>

namespace emulated {

struct Code {
  PyCodeObject* object;
  std::string file, function;
  bool is_torchs;
};

static const Code* code_of(PyCodeObject* object) {  // the GIL guards the table
  static auto* known = new std::unordered_map<PyCodeObject*, const Code*>();
  auto& code = (*known)[object];
  if (code) return code;
  Py_INCREF(object);
  const char* file = PyUnicode_AsUTF8(object->co_filename);
  const char* function = PyUnicode_AsUTF8(object->co_name);
  std::string path = file ? file : "?";
  const auto packages = path.find("site-packages/");
  const bool torchs = packages != std::string::npos &&
      path.compare(packages + 14, 6, "torch/") == 0;
  const bool ours = path.find("emulated_cuda/torch_cuda.py") != std::string::npos;
  code = new Code{object, path, function ? function : "?", torchs || ours};
  return code;
}

Place here() {
  Place place;
  if (!Py_IsInitialized() || !PyGILState_Check()) return place;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  for (int depth = 0; frame && depth < 60; ++depth) {
    PyCodeObject* object = PyFrame_GetCode(frame);
    const Code* code = code_of(object);
    Py_DECREF(object);
    if (!code->is_torchs || place.count == 0)
      place.frames[place.count++] = {code, PyFrame_GetLasti(frame)};
    if (place.count == static_cast<int>(place.frames.size())) break;
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return place;
}

std::vector<std::string> lines(const Place& place) {
  std::vector<std::string> text;
  for (int i = 0; i < place.count; ++i) {
    const auto& [code, instruction] = place.frames[i];
    const int line = PyCode_Addr2Line(code->object, instruction);
    text.push_back(code->file + ":" + std::to_string(line) + " in " + code->function);
  }
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
  const auto key = kind + quoted(finding.here) + quoted(finding.there);
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
