# cython: language_level=3
"""Data sheet of a selection's settings."""

cdef enum:
    # Of turns: who may serve two phases of a request takes turns in each, or half of an even number
    # of such ranks would always serve the same one.
    kLines = 2
    # Beside the turns of ROUND_ROBIN those that decide among equals have lines of their own.
    kTurns = 2 * kLines


cdef enum CMode:
    kKv           # the lowest cost
    kRoundRobin   # who has not been chosen for longest
    kRandom       # any
    kLeastLoaded  # the fewest requests
    kDirect       # whom the mask leaves, however busy: the caller has chosen


cdef struct CSettings:
    double overlap_weight                 # of the prefill term
    double device_credit                  # of a cached block
    double host_credit
    double disk_credit                    # disk and external
    double credit_decay                   # of the device credit, with the prefill load
    double active_request_weight          # of a request that the rank has, beside its blocks
    double uncached                       # of a token that is not cached; the weighted cost
    double hold_up                        # the same, of each request that decodes meanwhile
    double crowding                       # of it, of each request that the rank has
    double crowding_limit                 # tokens, infinite: off
    double queued                         # of a token that is being prefilled
    double per_request                    # in tokens, of a request that the rank has
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
    bint last_token                       # is computed, and its block with it


cdef class Settings:
    cdef CSettings c
    cdef readonly object members    # by name, as given and by default

    cdef double number(self, str name) except *
    cdef double threshold(self, str name) except *
