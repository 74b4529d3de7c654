"""JSON read without objects.

scan, scan.hpp               a body in one pass: integer arrays into memory, a few members into
                             Python
scan_ints.hpp, scan_text.hpp
                             arrays of integers, 64 bytes at a time; strings
stream.hpp                   JSON in pieces of any size, handed to a sink
text.hpp                     JSON written
"""
