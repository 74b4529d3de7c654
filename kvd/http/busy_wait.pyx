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
3. Where others run on the core in much of the time that it waits awake, the machine has other work,
   or the client has no other core: busy waits pause. Two polls in a row that lie further apart than
   a poll takes show it. Counting how often the kernel takes the core away does not: on an idle
   machine its own threads do so a hundred times a second, for some microseconds each.
"""
from kvd.telemetry.stretches cimport now_ns

cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
    int poll(pollfd* fds, unsigned long count, int timeout_ms)

# Share of a core that waits in vain may take, at most.
LOST_SHARE = 0.02

cdef double kLostShare = LOST_SHARE
cdef int64_t kMs = 1000000
cdef int64_t kMostCredit = 2 * kMs     # most time to lose in a row: some forty waits
cdef int64_t kWakeNs = 60000           # by which a wait asleep is longer than one awake
cdef double kWeight = 1 / 8.0          # of the last wait in the mean `_prompt`
cdef int64_t kCheckNs = 20 * kMs        # pause between two checks whether the machine is busy
cdef int64_t kTakenNs = 5000            # between two polls, which take 500: others had the core
cdef double kTakenShare = 0.25          # of the time awake that others have on a busy machine
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
        cdef pollfd watched
        cdef int ready
        watched.fd = fd
        watched.events = POLLIN
        with nogil:
            ready = self.wait(&watched, 1, timeout_ms, now_ns())
        return ready > 0

    cdef int wait(
        self, pollfd* watched, size_t count, int timeout_ms, int64_t began
    ) noexcept nogil:
        cdef int64_t polled, now = began
        cdef int ready
        cdef bint is_prompt
        if self._longest_ns == 0:
            return _sleep(watched, count, timeout_ms)
        if self._pays(began):
            while True:
                polled = now
                ready = poll(watched, count, 0)
                now = now_ns()
                if now - polled > kTakenNs:
                    self._taken_ns += now - polled
                if ready or now - began >= self._longest_ns:
                    break
            if ready:
                self.found_ns += now - began
                self._prompt += kWeight * (1 - self._prompt)
                return ready
            self.lost_ns += now - began
            self._credit_ns -= now - began
            self._prompt -= kWeight * self._prompt
            return _sleep(watched, count, timeout_ms)
        ready = _sleep(watched, count, timeout_ms)
        is_prompt = ready > 0 and now_ns() - began <= self._longest_ns + kWakeNs
        self._prompt += kWeight * (is_prompt - self._prompt)
        return ready

    cdef bint _pays(self, int64_t now) noexcept nogil:
        cdef int64_t gained = <int64_t>((now - self._at) * kLostShare)
        self._credit_ns = min(self._credit_ns + gained, kMostCredit)
        self._at = now
        return self._prompt > 0.5 and self._credit_ns > 0 and not self._is_machine_busy(now)

    cdef bint _is_machine_busy(self, int64_t now) noexcept nogil:
        cdef int64_t awake_ns = self.found_ns + self.lost_ns
        if now < self._busy_until:
            return True
        if now - self._checked_at < kCheckNs:
            return False
        if self._taken_ns > kTakenShare * (awake_ns - self._checked_awake_ns):
            self._busy_until = now + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, kMostPauseNs)
        elif awake_ns > self._checked_awake_ns:  # after a pause nothing is known yet
            self._pause_ns = kLeastPauseNs
        self._checked_at, self._checked_awake_ns, self._taken_ns = now, awake_ns, 0
        return now < self._busy_until


cdef int _sleep(pollfd* watched, size_t count, int timeout_ms) noexcept nogil:
    """Sleeps on the last descriptor alone, which takes less than to sleep on all of them."""
    cdef int ready = poll(watched + count - 1, 1, timeout_ms)
    if ready > 0 and count > 1:
        poll(watched, count - 1, 0)
    return ready
