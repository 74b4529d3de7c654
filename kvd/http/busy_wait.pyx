# distutils: language = c++
"""Waits for the next request without sleeping, where that costs less than waking up.

    wait ──> does it pay? ── yes ──> poll, poll, poll ... ──> something came
                 │ no                       │ nothing in time: lost
                 └──────────> sleep <───────┘

A process that falls asleep between two requests of one client spends more on that, and on waking
up, than on the request, and the client waits meanwhile. Waits asleep are measured as well, so it is
known without trying whether staying awake would pay.

1. It pays while most of the last waits were shorter than the longest that is allowed.
2. Waits in vain take at most LOST_SHARE of a core, whatever the clients do.
3. If the kernel takes the core away from this thread, the machine has other work, and busy waits
   pause.
"""
from kvd.telemetry.stretches cimport now_ns

cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd* fds, unsigned long count, int timeout_ms)

cdef extern from "<sys/resource.h>" nogil:
    enum:
        RUSAGE_THREAD
    struct rusage:
        long ru_nivcsw
    int getrusage(int who, rusage* usage)

# Share of a core that waits in vain may take, at most.
LOST_SHARE = 0.02

cdef double kLostShare = LOST_SHARE
cdef int64_t kMs = 1000000
cdef int64_t kMostCredit = 2 * kMs     # most time to lose in a row: some forty waits
cdef int64_t kWakeNs = 60000           # by which a wait asleep is longer than one awake
cdef double kWeight = 1 / 8.0          # of the last wait in the mean `_prompt`
cdef int64_t kCheckNs = 20 * kMs        # pause between two checks whether the machine is busy
cdef long kSwitches = 2                # involuntary switches between two checks: it is busy
# Pause without busy waits after a check that found the machine busy; it doubles each time that the
# next check does, too.
cdef int64_t kLeastPauseNs = 250 * kMs
cdef int64_t kMostPauseNs = 16000 * kMs


cdef class BusyWait:
    """The waits of one loop: `found_ns` spent awake until something came, `lost_ns` in vain."""

    def __cinit__(self, int longest_us=0):
        self._longest_ns = longest_us * <int64_t>1000
        self._pause_ns = kLeastPauseNs

    def allow(self, int longest_us):
        """Allows waits of so many microseconds without sleeping, if that is more than before."""
        self._longest_ns = max(self._longest_ns, longest_us * <int64_t>1000)

    def wait_readable(self, int fd, int timeout_ms):
        """Waits for a descriptor to be readable; returns whether it is."""
        cdef int ready
        with nogil:
            ready = self.wait(fd, timeout_ms)
        return ready > 0

    cdef int wait(self, int fd, int timeout_ms) noexcept nogil:
        cdef pollfd watched
        cdef int64_t began, now
        cdef int ready
        cdef bint is_prompt
        watched.fd = fd
        watched.events = POLLIN
        if self._longest_ns == 0:
            return poll(&watched, 1, timeout_ms)
        began = now = now_ns()
        if self._pays(began):
            while True:
                ready = poll(&watched, 1, 0)
                now = now_ns()
                if ready or now - began >= self._longest_ns:
                    break
            if ready:
                self.found_ns += now - began
                self._prompt += kWeight * (1 - self._prompt)
                return ready
            self.lost_ns += now - began
            self._credit_ns -= now - began
            self._prompt -= kWeight * self._prompt
            return poll(&watched, 1, timeout_ms)
        ready = poll(&watched, 1, timeout_ms)
        is_prompt = ready > 0 and now_ns() - began <= self._longest_ns + kWakeNs
        self._prompt += kWeight * (is_prompt - self._prompt)
        return ready

    cdef bint _pays(self, int64_t now) noexcept nogil:
        cdef int64_t gained = <int64_t>((now - self._at) * kLostShare)
        self._credit_ns = min(self._credit_ns + gained, kMostCredit)
        self._at = now
        return self._prompt > 0.5 and self._credit_ns > 0 and not self._is_machine_busy(now)

    cdef bint _is_machine_busy(self, int64_t now) noexcept nogil:
        cdef rusage usage
        if now < self._busy_until:
            return True
        if now - self._checked_at < kCheckNs:
            return False
        getrusage(RUSAGE_THREAD, &usage)
        # Switches since a check long ago do not show whether the machine is busy now.
        if now - self._checked_at < 2 * kCheckNs:
            if usage.ru_nivcsw - self._switches >= kSwitches:
                self._busy_until = now + self._pause_ns
                self._pause_ns = min(2 * self._pause_ns, kMostPauseNs)
            else:
                self._pause_ns = kLeastPauseNs
        self._checked_at, self._switches = now, usage.ru_nivcsw
        return now < self._busy_until
