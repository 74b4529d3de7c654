"""What a turn of a pollable has come to: its results in all compiled modules."""

cdef enum:
    kNothing  # nothing had come
    kAll      # all that had come was served
    kSome     # more may be waiting
