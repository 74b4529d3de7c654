"""Dumps of an index.

dump.hpp, format.hpp         writes an index run by run; the two forms of a dump
staged.hpp, binary.hpp, text.hpp
                             a received dump: checked as a whole, then applied in slices
recovery                     the module that Python uses
"""
