"""Reads JSON without making Python objects of it.

scan, scan.hpp               reads a body in one pass: integer arrays into memory, a few members
                             into Python
scan_ints.hpp, scan_text.hpp
                             reads arrays of integers, 64 bytes at a time; reads strings
stream.hpp                   reads JSON in pieces of any size, for a sink
text.hpp                     writes JSON
"""
