# cython: language_level=3
"""Data sheet of a selection's settings."""

cdef enum:
    # Lines of turns, one for each phase of a request: a rank that serves both phases takes turns in
    # each. With a single line, half of an even number of such ranks would always get the same one.
    kLines = 2
    # The turns that decide among equal costs have lines of their own, besides ROUND_ROBIN's.
    kTurns = 2 * kLines


cdef enum CMode:
    kKv           # the lowest cost
    kRoundRobin   # the rank that has not been chosen for longest
    kRandom       # any
    kLeastLoaded  # the fewest requests
    kDirect       # a rank that the mask leaves, however busy: the caller has chosen


cdef struct CSettings:                    # "of" names what a weight is applied to
    double overlap_weight                 # of the prefill term
    double device_credit                  # of a cached block
    double host_credit
    double disk_credit                    # disk and external
    double credit_decay                   # of the device credit, with the prefill load
    double active_request_weight          # of a request of the rank, besides its blocks
    double uncached                       # of a token that is not cached; the weighted cost
    double hold_up                        # of that, for each request that decodes meanwhile
    double crowding                       # of a token to compute, for each request of the rank
    double crowding_limit                 # tokens, infinite: off
    double queued                         # of a token that is being prefilled
    double per_request                    # of a request of the rank, in tokens
    double per_block                      # of a token of the blocks in use
    double product                        # of tokens to prefill, times requests
    double saturation                     # tokens, infinite: off
    double session_bound                  # of the mean requests plus 1, infinite: off
    double temperature                    # 0: the lowest cost
    double queue_threshold                # of max_num_batched_tokens, infinite: off
    double decode_blocks_threshold        # of total_kv_blocks, infinite: off
    double prefill_tokens_threshold       # tokens, infinite: off
    double prefill_tokens_threshold_frac  # of max_num_batched_tokens, infinite: off
    double decode_busy_threshold          # of total_kv_blocks, infinite: answers do not say
    CMode mode
    int line                              # of turns, below kLines
    bint weighted                         # the cost is the weighted one, not Dynamo's
    bint track_prefill
    bint track_active_blocks
    bint last_token                       # the last token's block is computed even if cached


cdef class Settings:
    cdef CSettings c
    cdef readonly object members    # by name, defaults included

    cdef double number(self, str name) except *
    cdef double threshold(self, str name) except *
