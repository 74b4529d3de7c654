# cython: language_level=3, cdivision=True
"""The cost at which a candidate would serve the prompt; lower is better.

There are two costs; docs/faces/selection.md describes both for operators.

Dynamo's, in blocks:

    prompt     [ device | host | disk | to compute ............. ]  isl tokens
                 1.0      0.75   0.25                               credits
    cached     round(block size x (device + 0.75 host + 0.25 disk))  tokens
    raw        (tokens being prefilled + isl, at least cached) / block size
    prefill    weight x max(0, raw - (credit x device + 0.75 host + 0.25 disk))
    decode     blocks in use + blocks of the prompt that are not yet in use
    cost       prefill + decode + active request weight x requests of the rank, by default 0

Without prefill tracking there is no prefill term. The credit is then taken off the decode term,
which does not fall below 0, unless the weight or the device credit is 0.

The device credit is a preference of the cost only: the tokens that a rank need not compute, and so
those that are booked, do not depend on it. Weight 0 makes the device credit 0.

With a decay above 0 and with prefill tracking, the device credit of a rank is

    credit x (1 / (1 + decay x (((its prefill tokens - least) / block size) / blocks of prompt)))

where `least` is the fewest prefill tokens of a rank that may be chosen, and a last block that is
not full counts. Credits of the tiers below do not decay.

With `last_token`, a prompt finds cached only what lies before the block of its last token: engines
compute that token to have something to continue from, and with it its whole block. So a prompt of
whole blocks that is cached to its end still has one block to compute.

The weighted cost, in tokens, is a sum of terms by the weights of the settings:

    n          tokens of the prompt to compute, at most `saturation` more than on the rank with the
               fewest to compute, among those that may be chosen
    P, D, A    of the rank: tokens being prefilled; requests with nothing left to prefill; all its
               requests
    uncached   uncached x n
    hold_up    uncached x n x (hold_up x D): how it delays the requests that decode
    crowding   n, at most `crowding_limit`, x (crowding x A): how it delays the requests that follow
               those of the rank
    queued     queued x P
    requests   per_request x A
    blocks     per_block x (blocks in use x block size)
    product    product x (max(1, P + n) x (A + 1))

P is 0 without prefill tracking, blocks in use are 0 without theirs.

Invariant: each operation is one on IEEE doubles, in the order written here; integers are summed
before they become doubles, and terms are added in this order. So costs are equal to the last bit on
every machine, and Dynamo's equal those of Dynamo 1.6.1 (the core is built with -ffp-contract=off).
Weights are finite and no operand is negative, so no cost is infinite or NaN.

All is inline, so that the pass over the candidates has no calls: there is no module of this name.
"""

from libc.math cimport INFINITY, round
from libc.stddef cimport size_t
from libc.stdint cimport UINT64_MAX, int64_t, uint32_t, uint64_t

from kvd_core.selector.settings cimport CSettings, kDirect, kKv
from kvd_core.selector.types cimport CCandidate, CPrompt, CCandidateState


cdef struct Scale:
    # What all candidates have in common.
    const CSettings* settings
    uint64_t isl               # tokens
    uint64_t blocks            # of the prompt
    uint64_t usable            # blocks of it that can be found cached
    uint32_t block_size
    double device_credit
    bint rejects               # there is a busy threshold that the mode heeds


cdef struct Used:
    # The cached blocks that the prompt can use.
    uint32_t device
    uint32_t host
    uint32_t disk


cdef struct CostTerms:
    uint64_t cached_tokens     # weighted by tier and rounded, halves away from zero
    uint64_t effective_tokens  # to prefill
    double raw                 # blocks to prefill before credits, those being prefilled included
    double credit              # blocks
    double prefill             # weighted
    double decode
    double cost


cdef struct WeightedTerms:
    double counted             # tokens to prefill, bounded by the saturation
    double uncached
    double hold_up
    double crowding
    double queued
    double requests
    double blocks
    double product
    double cost


cdef inline double real(uint64_t value) noexcept nogil:
    # Values stay below 2^63, and signed conversion is one instruction.
    return <double><int64_t>value


cdef inline double positive(double value) noexcept nogil:
    return value if 0.0 < value else 0.0


cdef inline bint exceeds(uint64_t value, double threshold, double capacity) noexcept nogil:
    return capacity > 0 and real(value) > threshold * capacity


cdef inline Scale scale_of(
    const CSettings* settings, const CPrompt* prompt, uint32_t block_size
) noexcept nogil:
    cdef Scale s
    s.settings = settings
    s.isl = prompt.isl_tokens
    s.blocks = prompt.sequence.size()
    s.usable = UINT64_MAX
    if settings.last_token:
        s.usable = ((s.isl if s.isl > 1 else 1) - 1) // block_size
    s.block_size = block_size
    s.device_credit = 0 if settings.overlap_weight == 0 else settings.device_credit
    s.rejects = settings.mode != kDirect and (
        settings.decode_blocks_threshold != INFINITY
        or settings.prefill_tokens_threshold != INFINITY
        or settings.prefill_tokens_threshold_frac != INFINITY
    )
    return s


# ---- tokens and blocks

cdef inline uint64_t started(const Scale* s) noexcept nogil:
    # Blocks of the prompt, including a last one that is not full.
    return s.isl // s.block_size + (s.isl % s.block_size != 0)


cdef inline Used used_blocks(const Scale* s, const CCandidateState* c) noexcept nogil:
    cdef Used used
    used.device = c.device
    used.host = c.host
    used.disk = c.disk
    if <uint64_t>c.device + c.host + c.disk <= s.usable:
        return used
    used.device = <uint32_t>min(<uint64_t>c.device, s.usable)
    used.host = <uint32_t>min(<uint64_t>c.host, s.usable - used.device)
    used.disk = <uint32_t>(s.usable - used.device - used.host)
    return used


cdef inline uint64_t tokens_of(const Scale* s, Used used) noexcept nogil:
    cdef double blocks
    if (used.host | used.disk) == 0:
        return <uint64_t>used.device * s.block_size
    blocks = (
        real(used.device)
        + s.settings.host_credit * real(used.host)
        + s.settings.disk_credit * real(used.disk)
    )
    return <uint64_t>round(blocks * real(s.block_size))


cdef inline uint64_t cached_tokens(const Scale* s, const CCandidateState* c) noexcept nogil:
    return tokens_of(s, used_blocks(s, c))


cdef inline uint64_t effective_tokens(const Scale* s, const CCandidateState* c) noexcept nogil:
    cdef uint64_t cached = cached_tokens(s, c)
    return s.isl - cached if s.isl > cached else 0


cdef inline uint64_t decode_blocks(const Scale* s, const CCandidateState* c) noexcept nogil:
    # The rank's blocks in use if the prompt were added.
    return c.decode_blocks + (s.blocks - c.live)


cdef inline uint64_t occupied_blocks(const Scale* s, const CCandidateState* c) noexcept nogil:
    # The same, counting a last block that is not full.
    return c.decode_blocks + (max(s.blocks, started(s)) - c.live)


# ---- the cost

cdef inline bint decays(const Scale* s) noexcept nogil:
    # Whether a rank's device credit depends on what others prefill.
    return s.settings.credit_decay != 0 and s.settings.track_prefill


cdef inline double device_credit_of(
    const Scale* s, const CCandidateState* c, uint64_t least
) noexcept nogil:
    # `least`: the fewest prefill tokens of a rank that may be chosen; UINT64_MAX unless it decays.
    cdef double excess
    if c.prefill_tokens <= least:
        return s.device_credit
    excess = real(c.prefill_tokens - least) / real(s.block_size)
    return s.device_credit * (
        1 / (1 + s.settings.credit_decay * (excess / real(max(started(s), <uint64_t>1))))
    )


cdef inline CostTerms terms_of(
    const Scale* s, const CCandidateState* c, double device_credit
) noexcept nogil:
    cdef CostTerms t
    cdef Used used = used_blocks(s, c)
    t.cached_tokens = tokens_of(s, used)
    t.effective_tokens = s.isl - t.cached_tokens if s.isl > t.cached_tokens else 0
    t.credit = (
        device_credit * real(used.device)
        + s.settings.host_credit * real(used.host)
        + s.settings.disk_credit * real(used.disk)
    )
    t.raw = 0
    t.prefill = 0
    t.decode = real(decode_blocks(s, c)) if s.settings.track_active_blocks else 0
    if s.settings.track_prefill:
        t.raw = real(c.prefill_tokens + t.effective_tokens + t.cached_tokens) / real(s.block_size)
        t.prefill = s.settings.overlap_weight * positive(t.raw - t.credit)
    elif s.device_credit > 0:
        t.decode = positive(t.decode - t.credit)
    t.cost = t.prefill + t.decode
    if s.settings.active_request_weight != 0:
        t.cost += s.settings.active_request_weight * real(c.requests)
    return t


cdef inline bint saturates(const Scale* s) noexcept nogil:
    # Whether the tokens to compute on a rank are bounded by those on others.
    return s.settings.weighted and s.settings.saturation != INFINITY


cdef inline WeightedTerms weighted_terms_of(
    const Scale* s, const CCandidateState* c, uint64_t least
) noexcept nogil:
    # `least`: the fewest tokens to compute on a rank that may be chosen; used if it saturates.
    cdef const CSettings* weight = s.settings
    cdef WeightedTerms t
    cdef double n = real(effective_tokens(s, c)), most = real(least) + weight.saturation
    cdef double queued = real(c.prefill_tokens) if weight.track_prefill else 0
    cdef double requests = real(c.requests)
    cdef double used = real(c.decode_blocks) if weight.track_active_blocks else 0
    t.counted = n if n < most else most
    t.uncached = weight.uncached * t.counted
    t.hold_up = t.uncached * (weight.hold_up * real(c.decoding))
    most = weight.crowding_limit
    most = t.counted if t.counted < most else most
    t.crowding = most * (weight.crowding * requests)
    t.queued = weight.queued * queued
    t.requests = weight.per_request * requests
    t.blocks = weight.per_block * (used * real(s.block_size))
    queued += t.counted
    t.product = weight.product * ((queued if 1.0 < queued else 1.0) * (requests + 1))
    t.cost = (
        t.uncached + t.hold_up + t.crowding + t.queued + t.requests + t.blocks + t.product
    )
    return t


cdef inline bint keeps_sessions(
    const Scale* s, const CCandidateState* c, uint64_t requests, size_t ranks
) noexcept nogil:
    # Whether a session may stay with a rank: it has at most `session_bound` times the mean requests
    # plus 1. The `ranks` that may be chosen have `requests` together.
    cdef double mean
    if s.settings.session_bound == INFINITY:
        return True
    mean = real(requests) / real(ranks) if ranks else 0.0
    return real(c.requests) <= s.settings.session_bound * (mean + 1.0)


# ---- thresholds

cdef inline bint is_blind(const Scale* s) noexcept nogil:
    # Whether the mode ignores what candidates cache and their load in tokens.
    return s.settings.mode != kKv and s.settings.mode != kDirect


cdef inline bint is_busy(
    const Scale* s, const CCandidate* candidate, const CCandidateState* c
) noexcept nogil:
    # New work waits while all candidates are busy.
    return s.settings.mode != kDirect and exceeds(
        c.prefill_tokens, s.settings.queue_threshold, candidate.max_batch_tokens
    )


cdef inline bint shows_decode_busy(const Scale* s, const CCandidate* candidate) noexcept nogil:
    # Whether answers say if the rank's blocks in use exceed the threshold with the prompt added.
    return s.settings.decode_busy_threshold != INFINITY and candidate.total_blocks >= 0


cdef inline bint is_decode_busy(
    const Scale* s, const CCandidate* candidate, const CCandidateState* c
) noexcept nogil:
    # A rank without blocks is busy with any.
    return real(occupied_blocks(s, c)) > s.settings.decode_busy_threshold * candidate.total_blocks


cdef inline bint prefills_too_much(const Scale* s, const CCandidateState* c) noexcept nogil:
    return real(c.prefill_tokens) > s.settings.prefill_tokens_threshold


cdef inline bint prefills_too_large_a_part(
    const Scale* s, const CCandidate* candidate, const CCandidateState* c
) noexcept nogil:
    return exceeds(
        c.prefill_tokens, s.settings.prefill_tokens_threshold_frac, candidate.max_batch_tokens
    )


cdef inline bint has_too_many_blocks(
    const Scale* s, const CCandidate* candidate, const CCandidateState* c
) noexcept nogil:
    return exceeds(c.decode_blocks, s.settings.decode_blocks_threshold, candidate.total_blocks)


cdef inline bint is_overloaded(
    const Scale* s, const CCandidate* candidate, const CCandidateState* c
) noexcept nogil:
    # Whether the rank gets no new work.
    return s.rejects and (
        prefills_too_much(s, c)
        or prefills_too_large_a_part(s, candidate, c)
        or has_too_many_blocks(s, candidate, c)
    )
