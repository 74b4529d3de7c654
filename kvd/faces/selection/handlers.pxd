# distutils: language = c++
"""Data sheet of the selection service's hot handlers."""
from libc.stdint cimport uint32_t, uint64_t

from kvd.faces.common.reader cimport BodyReader
from kvd.http.hot cimport HotHandler
from kvd.http.permits cimport Text
from kvd.selection.immediate cimport ImmediateSelection, ImmediateSteps
from kvd_core.base.draws cimport Draws
from kvd_core.selector.selector cimport Pool
from kvd_core.selector.settings cimport Settings


cdef class PromptReader(BodyReader):
    # The prompt of the last body. `unique` is only of a prompt by token ids, `locals_` only of one
    # by hashes, where `lora_name`, `cache_salt` and `eagle` have no effect: they are in the hashes.
    cdef readonly bint by_tokens
    cdef readonly str lora_name, cache_salt  # None: none
    cdef object unique              # the number of a prompt that shares no blocks in use, or None
    cdef readonly bint eagle
    cdef int locals_                # the array that is taken for its local hashes
    cdef readonly uint64_t isl_tokens

    # Reads the prompt of the scanned body; raises BadRequest if it is incomplete.
    cpdef int read_prompt(self, selections) except -1
    # Does the same for a booking on a chosen rank, which needs only the sequence hashes.
    cpdef int read_booked(self, selections) except -1
    # Makes a pool match the prompt that was read.
    cpdef int put_before(self, Pool pool) except -1

    cdef int read_tokens(self, selections) except -1
    # Reads what decides how token ids are hashed: the adapter, the salt, whether in EAGLE pairs.
    cdef int read_flavour(self) except -1
    cdef int check_lengths(self) except -1


cdef class PromptHandler(HotHandler):
    cdef PromptReader body
    cdef object selections   # kvd.selection.service.Selections
    cdef dict candidates     # by (model, tenant)

    # The model and tenant that the body names, as a tuple.
    cdef tuple partition_key(self)
    # The settings for the body, with what it overrides; raises Invalid.
    cdef Settings settings_in(self, partition_key)
    # Makes the candidates' pool match the body's prompt; raises Unserved if there is no worker.
    cdef Pool matched_pool(self, partition_key)

cdef class PotentialLoadsHandler(PromptHandler):
    cdef object kept    # the rows of the last answer, if it is written in pieces

cdef class OverlapScoresHandler(PromptHandler):
    cdef object pieces  # of the last answer, if it is written in pieces

cdef class SelectHandler(PromptHandler):
    cdef object reservations, scheduler  # parts of the selections
    cdef Draws draws
    cdef ImmediateSelection immediate
    # The last body's usual members, and the id of its booking (None if it books nothing).
    cdef str selection_id, session_id, reservation_id
    cdef uint32_t expected   # tokens of output; kNone: not given
    cdef bint is_matched      # the candidates' pool has matched its prompt
    cdef object receipt      # of the scheduler's booking, None without one
    cdef object queued       # the selection that waits
    cdef object booked_in    # the Candidates in which it was booked at once; None: it was not

    cdef bytes answered(self, const char* body, size_t size, request)
    cdef bint is_usual(self) noexcept
    cdef tuple usual_members(self)
    cdef object asked(self, partition_key, usual, members)
    cdef object read_booking(self, selection, request)
    cdef bytes served(self, candidates)
    cdef bytes scheduled(self, selection, retry, request)

cdef class ReservationHandler(HotHandler):
    cdef ImmediateSteps steps

cdef class PrefillCompleteHandler(ReservationHandler):
    pass

cdef class FreeHandler(ReservationHandler):
    pass

cdef class LoadsHandler(HotHandler):
    cdef object selections
