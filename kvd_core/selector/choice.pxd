# cython: language_level=3, cdivision=True
"""Chooses a candidate, once a match has found the state of all of them.

    candidates   w1/0      w1/1      w7/0      w9/0
    eligible      yes       yes       no        yes     the caller's mask
    overloaded    no        no        .         yes     over a busy threshold: left out
    open          0         1                           `find_open`
    busy          yes       no        .         .       if all are: kAllBusy, the caller waits
    weights      18.0      11.5                         costs, or the number of requests
    chosen                  1                           the lowest, or one drawn by temperature

The rules, with where they come from:

- once one candidate is not busy, busy ones are chosen as well if they cost least: the queue
  threshold says when to wait, not where to go (Dynamo 1.6.1, observed);
- a busy threshold takes out a single rank, whatever the other ranks of its worker do: each has its
  own cache and batch (Dynamo takes out a worker when all its ranks are over the threshold);
- with a temperature T, chances are in proportion to exp(-(cost - lowest) / (highest - lowest) / T);
  T = 0 takes the lowest cost, and equal ones have equal chances;
- the least loaded rank is the one with the fewest requests (Dynamo: connections);
- modes that do not weigh the prompt leave busy ranks out as long as there are others: a request
  that has waited would otherwise be sent to a rank that is still busy;
- turns follow when a rank was last chosen, so they are fair whatever masks come in between, and
  they outlive a pool (`Pool.take_turns`); a new rank comes first; each line has its own turns;
- among equal weighted costs, the rank that has to compute least of the prompt is chosen, then the
  one with the fewest requests, then the one that this cost has not chosen for longest; among equal
  costs of Dynamo's, any;
- a session stays where it is bound while the rank is within `session_bound` (`keeps_sessions`);
- under such a bound, an idle rank that has not been chosen for long takes what would go to a rank
  with more than the mean requests plus 1, if that caches no more of it than its running requests
  share, and unless it caches more than half as much: otherwise a beginning that all prompts share
  would never leave the ranks that computed it first;
- factors multiply costs, by the preferences of the prompt's sender.

Costs: O(candidates), with a temperature one exp for each. Nothing is allocated. A further mode is a
branch of `choose`, a further cost one of `weigh`.

All is inline, as in `cost.pxd`.
"""

from libc.math cimport INFINITY, exp, ldexp
from libc.stddef cimport size_t
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from kvd_core.selector.cost cimport (
    Scale, cached_tokens, decays, device_credit_of, effective_tokens, is_blind, is_busy,
    is_overloaded, real, saturates, terms_of, weighted_terms_of
)
from kvd_core.selector.settings cimport kLeastLoaded, kLines, kRandom, kRoundRobin, kTurns
from kvd_core.selector.types cimport CCandidate, CCandidateState

cdef extern from *:
    ctypedef unsigned long long uint128_t "unsigned __int128"


cdef enum:
    # Choices for each open candidate, after which an idle one that got none is due. One that has
    # its share of the prompts gets none of so many by chance in 1 of 400 cases.
    kLeftOut = 6


# Why no candidate was chosen. Positions of candidates are not negative.
cdef enum Refusal:
    kNoCandidate = -1  # no candidate is eligible
    kAllBusy = -2      # all that could be chosen are busy: wait
    kAllOver = -3      # all that are eligible exceed a busy threshold: reject


cdef struct Turn:
    # What the last choice by turns has changed.
    bint taken
    size_t at           # position in `turns`
    uint64_t before     # the value that was there


cdef struct Choice:
    # The parts of a pool that choosing uses. Arrays have an element for each candidate, `turns`
    # has kTurns.
    const CCandidate* candidates
    const CCandidateState* states  # of the last match
    size_t size
    uint32_t* open              # positions of candidates that may be chosen, ascending
    size_t n_open
    uint32_t* spare             # scratch for positions: of idle candidates, of equal ones
    double* weights             # of the open candidates, lower is better
    uint64_t* turns             # when each candidate was last chosen in a line; 0: never
    uint64_t turn               # number of choices by turns, here and in former pools
    Turn last


# ---- which candidates may be chosen

cdef inline int64_t find_open(
    Choice* choice, const Scale* scale, const uint8_t* mask
) noexcept nogil:
    # Lists the candidates that may be chosen in `open`; returns 0, or the Refusal if none may.
    cdef const CCandidate* candidates = choice.candidates
    cdef const CCandidateState* states = choice.states
    cdef uint32_t* open = choice.open
    cdef uint32_t* idle = choice.spare
    cdef bint blind = is_blind(scale), some = False, all_busy = True
    cdef size_t n = 0, n_idle = 0
    cdef uint32_t i
    for i in range(<uint32_t>choice.size):
        if (mask != NULL and mask[i] == 0) or not states[i].present:
            continue
        some = True
        if is_overloaded(scale, &candidates[i], &states[i]):
            continue
        open[n] = i
        n += 1
        if blind:
            if not is_busy(scale, &candidates[i], &states[i]):
                idle[n_idle] = i
                n_idle += 1
        else:
            all_busy = all_busy and is_busy(scale, &candidates[i], &states[i])
    choice.n_open = n
    if not some:
        return kNoCandidate
    if n == 0:
        return kAllOver
    if n_idle == 0 if blind else all_busy:
        return kAllBusy
    if blind:
        choice.open = idle
        choice.n_open = n_idle
        choice.spare = open
    return 0


cdef inline uint64_t least_prefill(const Choice* choice, const Scale* scale) noexcept nogil:
    # The fewest prefill tokens of the open candidates, if a decaying credit needs them.
    cdef uint64_t least = UINT64_MAX
    cdef size_t k
    if decays(scale):
        for k in range(choice.n_open):
            least = min(least, choice.states[choice.open[k]].prefill_tokens)
    return least


cdef inline uint64_t least_uncached(const Choice* choice, const Scale* scale) noexcept nogil:
    # The fewest tokens to compute on an open candidate, if the weighted cost needs them.
    cdef uint64_t least = scale.isl
    cdef size_t k
    if saturates(scale):
        for k in range(choice.n_open):
            least = min(least, effective_tokens(scale, &choice.states[choice.open[k]]))
    return least


cdef inline uint64_t open_requests(const Choice* choice) noexcept nogil:
    # The requests of all open candidates together.
    cdef uint64_t requests = 0
    cdef size_t k
    for k in range(choice.n_open):
        requests += choice.states[choice.open[k]].requests
    return requests


# ---- weights

cdef inline void weigh_costs(
    Choice* choice, const Scale* scale, const double* factors
) noexcept nogil:
    cdef const CCandidateState* states = choice.states
    cdef const uint32_t* open = choice.open
    cdef double* weights = choice.weights
    cdef uint64_t least
    cdef size_t k
    if decays(scale):
        least = least_prefill(choice, scale)
        for k in range(choice.n_open):
            weights[k] = terms_of(
                scale, &states[open[k]], device_credit_of(scale, &states[open[k]], least)
            ).cost
    else:
        for k in range(choice.n_open):
            weights[k] = terms_of(scale, &states[open[k]], scale.device_credit).cost
    multiply(choice, factors)


cdef inline void weigh_weighted_costs(
    Choice* choice, const Scale* scale, const double* factors
) noexcept nogil:
    cdef const CCandidateState* states = choice.states
    cdef uint64_t least = least_uncached(choice, scale)
    cdef size_t k
    for k in range(choice.n_open):
        choice.weights[k] = weighted_terms_of(scale, &states[choice.open[k]], least).cost
    multiply(choice, factors)


cdef inline void multiply(Choice* choice, const double* factors) noexcept nogil:
    cdef size_t k
    if factors != NULL:
        for k in range(choice.n_open):
            choice.weights[k] *= factors[choice.open[k]]


cdef inline void weigh_requests(Choice* choice) noexcept nogil:
    cdef size_t k
    for k in range(choice.n_open):
        choice.weights[k] = choice.states[choice.open[k]].requests


cdef inline void weigh(Choice* choice, const Scale* scale, const double* factors) noexcept nogil:
    if scale.settings.mode == kLeastLoaded:
        weigh_requests(choice)
    elif scale.settings.weighted:
        weigh_weighted_costs(choice, scale, factors)
    else:
        weigh_costs(choice, scale, factors)


# ---- the choice

cdef inline bint takes_lowest(const Scale* scale) noexcept nogil:
    # Whether any candidate with the lowest weight may be chosen.
    return scale.settings.mode == kLeastLoaded or (
        not scale.settings.weighted and scale.settings.temperature == 0
    )


cdef inline size_t below(size_t n, uint64_t random) noexcept nogil:
    # Uniform in [0, n): the error of the multiplication is n / 2^64.
    cdef uint128_t product = random
    product *= n
    return <size_t>(product >> 64)


cdef inline int64_t any_open(const Choice* choice, uint64_t random) noexcept nogil:
    return choice.open[below(choice.n_open, random)]


cdef inline int64_t lowest(Choice* choice, uint64_t random) noexcept nogil:
    # Any of the open candidates with the lowest weight.
    cdef const double* weights = choice.weights
    cdef uint32_t* equal = choice.spare
    cdef double best = weights[0]
    cdef size_t n = 0, k
    for k in range(choice.n_open):
        best = weights[k] if weights[k] < best else best
    for k in range(choice.n_open):
        if weights[k] == best:
            equal[n] = choice.open[k]
            n += 1
    return equal[below(n, random)]


cdef inline double weigh_chances(Choice* choice, double temperature) noexcept nogil:
    # Replaces costs by weights that the chances are in proportion to, and returns their sum. If all
    # costs are equal, returns 0 and changes nothing.
    cdef double* weights = choice.weights
    cdef double least = weights[0], most = weights[0], total = 0
    cdef size_t k
    for k in range(choice.n_open):
        least = weights[k] if weights[k] < least else least
        most = weights[k] if weights[k] > most else most
    if least == most:
        return 0
    for k in range(choice.n_open):
        weights[k] = exp(-((weights[k] - least) / (most - least) / temperature))
        total += weights[k]
    return total


cdef inline int64_t drawn(Choice* choice, double temperature, uint64_t random) noexcept nogil:
    cdef double total = weigh_chances(choice, temperature), passed = 0, target
    cdef const double* weights = choice.weights
    cdef size_t chosen = 0, k
    if total == 0:
        return any_open(choice, random)
    target = ldexp(<double>(random >> 11), -53) * total
    for k in range(choice.n_open):
        if weights[k] == 0:
            continue
        chosen = k
        passed += weights[k]
        if passed > target:
            break
    return choice.open[chosen]


cdef inline uint64_t turn_of(const Choice* choice, uint32_t candidate, int line) noexcept nogil:
    return choice.turns[<size_t>candidate * kTurns + line]


cdef inline int64_t take_turn(Choice* choice, uint32_t chosen, int line) noexcept nogil:
    choice.last.taken = True
    choice.last.at = <size_t>chosen * kTurns + line
    choice.last.before = choice.turns[choice.last.at]
    choice.turn += 1
    choice.turns[choice.last.at] = choice.turn
    return chosen


cdef inline uint32_t next_in_turn(const Choice* choice, int line) noexcept nogil:
    cdef uint32_t chosen = choice.open[0]
    cdef size_t k
    for k in range(choice.n_open):
        if turn_of(choice, choice.open[k], line) < turn_of(choice, chosen, line):
            chosen = choice.open[k]
    return chosen


cdef inline bint goes_before(
    const Choice* choice, const Scale* scale, size_t k, size_t other
) noexcept nogil:
    # Which of two open candidates with the same weight is chosen: True for the first.
    cdef uint32_t one = choice.open[k], two = choice.open[other]
    cdef int line = kLines + scale.settings.line
    cdef uint64_t mine = effective_tokens(scale, &choice.states[one])
    cdef uint64_t theirs = effective_tokens(scale, &choice.states[two])
    if mine != theirs:
        return mine < theirs
    if choice.states[one].requests != choice.states[two].requests:
        return choice.states[one].requests < choice.states[two].requests
    return turn_of(choice, one, line) < turn_of(choice, two, line)


cdef inline uint32_t lowest_in_order(const Choice* choice, const Scale* scale) noexcept nogil:
    # The open candidate with the lowest weight; among equals, the one that `goes_before` the rest.
    cdef const double* weights = choice.weights
    cdef size_t best = 0, k
    for k in range(1, choice.n_open):
        if weights[k] < weights[best] or (
            weights[k] == weights[best] and goes_before(choice, scale, k, best)
        ):
            best = k
    return choice.open[best]


cdef inline uint32_t lowest_or_left_out(const Choice* choice, const Scale* scale) noexcept nogil:
    # The lowest in order. If that has more than the mean requests plus 1, and sessions are bounded:
    # the idle candidate that has been left out for longest, if for long enough. One that caches
    # more than half as much of the prompt lacks no common beginning: it is left out by chance.
    # What the lowest caches beyond the blocks that its requests use is no such beginning either,
    # but the conversation's former turns, which would be computed again.
    cdef uint32_t chosen = lowest_in_order(choice, scale), each
    cdef int line = kLines + scale.settings.line
    cdef uint64_t due = choice.n_open * kLeftOut
    cdef uint64_t cached
    cdef double mean
    cdef size_t k
    if scale.settings.session_bound == INFINITY:
        return chosen
    mean = real(open_requests(choice)) / real(choice.n_open)
    if real(choice.states[chosen].requests) <= mean + 1.0:
        return chosen
    cached = cached_tokens(scale, &choice.states[chosen])
    if cached > <uint64_t>choice.states[chosen].live * scale.block_size:
        return chosen
    due = choice.turn - due if choice.turn > due else 0
    for k in range(choice.n_open):
        each = choice.open[k]
        if (
            choice.states[each].requests == 0
            and turn_of(choice, each, line) < due
            and 2 * cached_tokens(scale, &choice.states[each]) <= cached
        ):
            chosen = each
            due = turn_of(choice, each, line)
    return chosen


cdef inline void return_turn(Choice* choice) noexcept nogil:
    # The last choice has not come to pass: the rank gets its turn back.
    if choice.last.taken:
        choice.turns[choice.last.at] = choice.last.before


# ---- the chances of a choice, without choosing

cdef inline double leave_one(Choice* choice, uint32_t candidate) noexcept nogil:
    cdef size_t k
    for k in range(choice.n_open):
        choice.weights[k] = choice.open[k] == candidate
    return 1


cdef inline double leave_all(Choice* choice) noexcept nogil:
    cdef size_t k
    for k in range(choice.n_open):
        choice.weights[k] = 1
    return real(choice.n_open)


cdef inline double leave_lowest(Choice* choice) noexcept nogil:
    cdef double best = choice.weights[0], total = 0
    cdef size_t k
    for k in range(choice.n_open):
        best = choice.weights[k] if choice.weights[k] < best else best
    for k in range(choice.n_open):
        choice.weights[k] = choice.weights[k] == best
        total += choice.weights[k]
    return total


cdef inline double set_chances(Choice* choice, const Scale* scale) noexcept nogil:
    # Replaces the weights of the open candidates by weights that the chances of `choose` are in
    # proportion to, and returns their sum. No turn is taken.
    cdef double total
    if scale.settings.mode == kRandom:
        return leave_all(choice)
    if scale.settings.mode == kRoundRobin:
        return leave_one(choice, next_in_turn(choice, scale.settings.line))
    if takes_lowest(scale):
        return leave_lowest(choice)
    if scale.settings.temperature == 0:
        return leave_one(choice, lowest_or_left_out(choice, scale))
    total = weigh_chances(choice, scale.settings.temperature)
    return total if total != 0 else leave_all(choice)


cdef inline int64_t choose(
    Choice* choice, const Scale* scale, const uint8_t* mask, uint64_t random, const double* factors
) noexcept nogil:
    # Returns the position of a candidate, or a Refusal. `mask` has a byte for each candidate, 0 if
    # it must not be chosen; NULL allows all. `random` is uniform. `factors` has a factor for the
    # cost of each candidate; NULL for 1.
    cdef int64_t refusal
    choice.last.taken = False
    refusal = find_open(choice, scale, mask)
    if refusal < 0:
        return refusal
    if scale.settings.mode == kRoundRobin:
        return take_turn(
            choice, next_in_turn(choice, scale.settings.line), scale.settings.line
        )
    if scale.settings.mode == kRandom:
        return any_open(choice, random)
    weigh(choice, scale, factors)
    if takes_lowest(scale):
        return lowest(choice, random)
    if scale.settings.temperature == 0:
        return take_turn(
            choice, lowest_or_left_out(choice, scale), kLines + scale.settings.line
        )
    return drawn(choice, scale.settings.temperature, random)
