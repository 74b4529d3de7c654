// Measuring and printing: clocks, the usage of a server process, percentiles, JSON lines.
#pragma once

#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvbench {

inline double clock_seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

inline double now() { return clock_seconds(CLOCK_MONOTONIC); }

// Returns the CPU that the generator itself has used, which shows if it was the bottleneck.
inline double own_cpu_seconds() { return clock_seconds(CLOCK_PROCESS_CPUTIME_ID); }

inline void sleep_seconds(double seconds) {
  if (seconds <= 0) return;
  timespec t;
  t.tv_sec = time_t(seconds);
  t.tv_nsec = long((seconds - double(t.tv_sec)) * 1e9);
  nanosleep(&t, nullptr);
}

struct Usage {
  double user_s = 0;
  double system_s = 0;
  long rss_bytes = 0;

  double cpu_s() const { return user_s + system_s; }
};

// The server under test, seen through /proc. CPU is counted in clock ticks of 10 ms, so a figure is
// good to 1 % only if the server spends at least a second of CPU in a run.
class ServerProcess {
 public:
  explicit ServerProcess(long pid) : pid_(pid) {}

  bool known() const { return pid_ != 0; }

  Usage usage() const {
    Usage usage;
    if (known()) {
      read_cpu(usage);
      usage.rss_bytes = resident_pages() * sysconf(_SC_PAGESIZE);
    }
    return usage;
  }

  // Returns RSS once it is stable, since allocators return memory a little later.
  long settled_rss_bytes() const {
    constexpr int kLooks = 20;           // at most 4 s
    constexpr double kLookApart = 0.2;   // seconds; longer than an allocator's purge delay
    constexpr long kStill = 256 * 1024;  // bytes; well below 1 byte per pair at 1M pairs
    long last = usage().rss_bytes;
    for (int look = 0; look < kLooks; look++) {
      sleep_seconds(kLookApart);
      const long rss = usage().rss_bytes;
      if (std::labs(rss - last) < kStill) return rss;
      last = rss;
    }
    return last;
  }

 private:
  std::string proc_file(const char* name) const {
    const std::string path = "/proc/" + std::to_string(pid_) + "/" + name;
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    if (!file || text.str().empty()) throw std::runtime_error("cannot read " + path);
    return text.str();
  }

  void read_cpu(Usage& usage) const {
    const std::string text = proc_file("stat");
    // The command name may hold blanks and brackets; fields are counted after its last ')'.
    const char* fields = text.c_str() + text.rfind(')') + 2;
    unsigned long user = 0, system = 0;
    std::sscanf(fields, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system);
    const double tick = 1.0 / double(sysconf(_SC_CLK_TCK));
    usage.user_s = double(user) * tick;
    usage.system_s = double(system) * tick;
  }

  long resident_pages() const {
    long total = 0, resident = 0;
    std::sscanf(proc_file("statm").c_str(), "%ld %ld", &total, &resident);
    return resident;
  }

  long pid_;
};

// Returns the q-quantile (nearest rank, exact) of samples, 0 without any; reorders them.
inline double quantile(std::vector<float>& samples, double q) {
  if (samples.empty()) return 0;
  const size_t rank = std::min(samples.size() - 1, size_t(q * double(samples.size())));
  std::nth_element(samples.begin(), samples.begin() + long(rank), samples.end());
  return samples[rank];
}

// One JSON object on one line of standard output.
class JsonLine {
 public:
  JsonLine& text(const char* name, const std::string& value) {
    return raw(name, "\"" + value + "\"");
  }
  JsonLine& count(const char* name, unsigned long long value) {
    return raw(name, std::to_string(value));
  }
  JsonLine& number(const char* name, double value) {
    char digits[64];
    std::snprintf(digits, sizeof digits, "%.6g", std::isfinite(value) ? value : 0.0);
    return raw(name, digits);
  }
  void print() const {
    std::printf("{%s}\n", line_.c_str());
    std::fflush(stdout);  // the reader may be waiting at the other end of a pipe
  }

 private:
  JsonLine& raw(const char* name, const std::string& value) {
    if (!line_.empty()) line_ += ", ";
    line_ += "\"" + std::string(name) + "\": " + value;
    return *this;
  }

  std::string line_;
};

}  // namespace kvbench
