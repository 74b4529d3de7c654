from libc.stdint cimport uint64_t

cdef extern from "base/recent.hpp" namespace "kvd" nogil:
    size_t kRecent
    cppclass CRecent "kvd::Recent":
        void note(uint64_t, const void*, size_t)
        void skip(uint64_t, uint64_t)
        bint skipped(uint64_t)
        bint holds(uint64_t, const void*, size_t)
        const uint64_t* digests()
        void recall(const void*)

cdef class Recent:
    cdef CRecent c  # digests of batches by number, 8 bytes each
    cdef public uint64_t expected
    cpdef note(self, uint64_t number, bytes payload)
