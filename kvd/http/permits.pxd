# distutils: language = c++
"""Data sheet of the rules of authorization (permits.pyx)."""
from libcpp cimport bool as cbool


cdef extern from "http/plain_head.hpp" namespace "kvd" nogil:
    cppclass Text:
        const char* begin
        size_t size

    cppclass Claims:
        void take(const Text& name, const Text& text)


cdef extern from "http/permits.hpp" namespace "kvd" nogil:
    enum class Verdict(int):
        granted

    cppclass Authorizer:
        void clear()
        void add_token(const char* text, size_t size, unsigned scopes)
        void add_host(const char* name, size_t size)
        void add_origin(const char* origin, size_t size)
        # `scope`: of the route, as bits, 0 if it is open; `checks_host`: whether a page can make
        # its own name lead to this listener.
        Verdict judge(const Claims& claims, unsigned scope, cbool checks_host)


cdef class PermitRules:
    cdef Authorizer core
