# distutils: language = c++
"""Sums over the choices of a selection service (see `selector/choice_stats.hpp`)."""

from cython.operator cimport dereference as deref

from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings

MODES = <int>kModes
PHASES = <int>kPhases
CHOICE_PHASES = <int>kChoicePhases
OUTCOMES = <int>kOutcomes

# Upper bounds of the buckets; the last bucket has none, except for the shares.
REGRET_BOUNDS = (0, *(1 << k for k in range(15)))
LENGTH_BOUNDS = (0, *(1 << k for k in range(21)))
RATE_BOUNDS = tuple(k / 10 for k in range(11))


cdef class ChoiceStats:
    """The counts of all pools of a service. Phases and outcomes are numbers; callers name them."""

    def serve(self, Settings settings not None, int phase, Pool pool not None):
        """Counts a request as served, with the prompt that the pool has matched."""
        self.c.serve(settings.c.mode, checked(phase, kPhases), pool.c.prompt().isl_tokens)

    def end(self, Settings settings not None, int phase, int outcome):
        """Counts a request that ended in any other way."""
        self.c.outcomes[<int>settings.c.mode][checked(phase, kPhases)][
            checked(outcome, kOutcomes)
        ] += 1

    def hold(self, Settings settings not None, int phase):
        """Counts a request that waits."""
        self.c.held[<int>settings.c.mode][checked(phase, kPhases)] += 1

    def choose(self, Pool pool not None, Settings settings not None, Py_ssize_t candidate,
               uint32_t best, int phase):
        """Counts a choice for the prompt that the pool has matched; `best` is from `Pool.best`."""
        cdef size_t at = pool.at(candidate)
        self.c.choose(
            deref(pool.c), at, pool.cached_tokens_of(&settings.c, at), best,
            checked(phase, kChoicePhases),
        )

    def outcomes(self):
        """Yields (mode, phase, outcome, number) for those that have occurred."""
        for mode in range(MODES):
            for phase in range(PHASES):
                for outcome in range(OUTCOMES):
                    if number := self.c.outcomes[<int>mode][<int>phase][<int>outcome]:
                        yield mode, phase, outcome, number

    def held(self):
        """Yields (mode, phase, number) for those that have occurred."""
        for mode in range(MODES):
            for phase in range(PHASES):
                if number := self.c.held[<int>mode][<int>phase]:
                    yield mode, phase, number

    def lengths(self):
        """Returns the served requests' prompts by LENGTH_BOUNDS, and the sum of their tokens."""
        return [number for number in self.c.lengths.buckets], self.c.served_tokens

    def choices(self, int phase):
        """Returns the sums over the choices for one phase, by name.

        `regret` has a number for each of REGRET_BOUNDS and one more, `rates` one for each of
        RATE_BOUNDS; `rates_sum` is the sum of the rates.
        """
        cdef CChoiceSums* sums = &self.c.choices[checked(phase, kChoicePhases)]
        return {
            "choices": sums.choices,
            "prompt_tokens": sums.prompt_tokens,
            "cached_tokens": sums.cached_tokens,
            "effective_tokens": sums.effective_tokens,
            "chosen_blocks": sums.chosen_blocks,
            "best_blocks": sums.best_blocks,
            "chosen_tokens": sums.chosen_tokens,
            "best_tokens": sums.best_tokens,
            "regret": [number for number in sums.regret.buckets],
            "rates": [number for number in sums.rates.buckets],
            "rates_sum": sums.rates.sum,
        }


cdef size_t checked(int number, size_t end) except? 0:
    if not 0 <= number < <int>end:
        raise IndexError(number)
    return number
