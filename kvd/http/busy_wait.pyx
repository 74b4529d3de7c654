# distutils: language = c++
"""Waits for the next request without sleeping, for as long as that costs less than to wake up.

    wait ──> does it pay? ── yes ──> poll, poll, poll ... ──> something came
                 │ no                       │ nothing in time: lost
                 └──────────> sleep <───────┘

A process that falls asleep between two requests of one client spends more on that, and on waking,
than on the request, and the client waits for it. Whether it pays is known without trying: how soon
the next request comes is measured asleep, too.

1. It pays while most of the last waits have been shorter than the longest that is allowed.
2. What was waited in vain is at most LOST_SHARE of a core, whatever the clients do.
3. A machine that takes the core away from us has other work: then there is a pause.
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

# Share of a core that waits in vain may take.
LOST_SHARE = 0.02

cdef double kLostShare = LOST_SHARE
cdef int64_t kMs = 1000000
cdef int64_t kMostCredit = 2 * kMs     # lost at once: some forty waits
cdef int64_t kWakeNs = 60000           # that a wait asleep is longer than one awake
cdef double kWeight = 1 / 8.0          # of the last wait
cdef int64_t kCheckNs = 20 * kMs        # pause between two checks whether the machine is busy
cdef long kSwitches = 2                # times that the core is taken away meanwhile, if it is
cdef int64_t kLeastPauseNs = 250 * kMs    # without waits after a check that found it busy; twice
cdef int64_t kMostPauseNs = 16000 * kMs   # as long each time that the next one does so, too


cdef class BusyWait:
    """The waits of one loop: `found_ns` awake until something came, `lost_ns` in vain."""

    def __cinit__(self, int longest_us=0):
        self._longest_ns = longest_us * <int64_t>1000
        self._pause_ns = kLeastPauseNs

    def allow(self, int longest_us):
        """Has waits without sleeping take so many microseconds, if that is more than before."""
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
        # What was taken away over a longer time says nothing.
        if now - self._checked_at < 2 * kCheckNs:
            if usage.ru_nivcsw - self._switches >= kSwitches:
                self._busy_until = now + self._pause_ns
                self._pause_ns = min(2 * self._pause_ns, kMostPauseNs)
            else:
                self._pause_ns = kLeastPauseNs
        self._checked_at, self._switches = now, usage.ru_nivcsw
        return now < self._busy_until
