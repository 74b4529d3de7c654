# Event messages out of a ZMQ SUB socket, without pyzmq in between; drain.hpp has the picture.
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool


cdef extern from "drain.hpp" namespace "kvd" nogil:
    cdef cppclass Libzmq:
        const char* load(const char* module_path)  # null, or what is wrong

    cdef enum class Got:
        empty            # no message is waiting
        event            # seq, payload and size describe a well-formed message
        bad_frame_count  # another number of frames than 3
        bad_sequence     # the second frame is not 8 bytes long
        failed           # libzmq refused; errno says why

    cdef cppclass MessageReader:
        MessageReader(const Libzmq&, void* socket)
        Got next()
        uint64_t seq()
        const char* payload()  # valid until the following next()
        size_t size()          # bytes of the payload

    cdef cppclass Deadline:
        Deadline(int64_t budget_ns)
        bool passed()
