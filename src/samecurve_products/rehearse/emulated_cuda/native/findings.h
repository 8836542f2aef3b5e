// Faults that the emulator saw, each with the Python lines of both sides.
#pragma once
#include <array>
#include <string>
#include <vector>

namespace emulated {

struct Code;  // a Python code object's file and name, kept for ever

// The Python lines of a call, innermost first: cheap to take, turned into text only for a finding.
// torch's own lines are left out but for the innermost, so that the user's lines fit.
struct Place {
  struct Frame {
    const Code* code;
    int instruction;
  };
  std::array<Frame, 6> frames;
  int count = 0;
  bool is_backward = false;  // the lines are those of the forward operation
};

// The lines of this thread. In autograd's thread, which has none, those of the forward operation
// whose gradient it computes; empty where that is not known.
Place here();
std::string users_line(const Place& place);  // the innermost line outside of torch; '' if unknown
std::vector<std::string> lines(const Place& place);

struct Finding {
  std::string kind, text;
  std::vector<std::string> here, there;
  int64_t times = 1;
};

// Keeps the finding, appends it to this process's report file, and prints it where asked.
void add_finding(const std::string& kind, const std::string& text, const Place& here,
                 const Place& there = {}, bool always_print = false);
std::vector<Finding> findings();
int64_t findings_made();

}  // namespace emulated
