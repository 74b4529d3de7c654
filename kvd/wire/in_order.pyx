# distutils: language = c++
"""The two steps of each message of a stream, compiled: in Python they took a fifth of its time.

    EventStream.take ── next, and of the same engine ──> AppliedBatches.apply ──> done
          └── any other ──> hold           not next, or number 0 ──> come_to │ bits shown ──> learn

Those two classes derive from the ones here, and have the rare cases: `hold`, `come_to`, `learn`.
"""
from kvd.wire.engine_identity import IdentityCheck

cdef object NO_CHECK = IdentityCheck.NONE


cdef class Taken:
    """Counts of the messages that a stream has taken."""


cdef class Applier:
    """Applies the batches of a stream, each once and in order."""

    def __init__(self, Recent recent not None, apply not None):
        """`recent` knows which number is next; `apply` is that of a `BatchSink`."""
        self._recent = recent
        self._apply = apply

    def apply(self, uint64_t seq, bytes payload not None):
        """Applies the next batch, or one behind numbers that will not come any more.

        Returns whether the batch is unfinished.
        """
        return self.apply_next(seq, payload)

    cdef bint apply_next(self, uint64_t seq, bytes payload) except -1:
        if seq != self._recent.expected or seq == 0:
            self.come_to(seq, payload)
        self._recent.note(seq, payload)
        shown = self._apply(payload)
        return shown != 0 and self.learn(seq, shown)


cdef class Taker:
    """Takes the messages of a stream."""

    def __init__(self, Taken taken not None, Applier applier not None, identity not None):
        self._taken = taken
        self._applier = applier
        self._identity = identity

    def take(self, uint64_t seq, bytes payload not None):
        """Applies the next batch; holds any other batch back.

        Returns True if the batch was held back or is unfinished, so that the task has work to do.
        """
        self._taken.messages += 1
        self._taken.payload_bytes += len(payload)
        if seq == self._applier._recent.expected and self._identity.check is NO_CHECK:
            return self._applier.apply_next(seq, payload)
        self.hold(seq, payload)
        return True
