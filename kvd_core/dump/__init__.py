"""Dumps of an index.

dump.hpp, format.hpp         an index written run by run; the two forms
staged.hpp, binary.hpp, text.hpp
                             a received dump: checked whole, then applied in slices
recovery                     the module that Python uses
"""
