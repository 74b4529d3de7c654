"""Explains why a request goes where it goes: /explain of every face, behind `kvd explain`.

    body ──> Question ─┬─ Scheduler.weigh: chances, terms of each rank's cost
                       └─ Traces: how far each rank caches the prompt, why it ends, what happened
                                                                        └─> Explanation, as JSON

questions   what a body asks about: a prompt, or the request of a booking
traces      a prompt followed through the chronicle of its index
answers     what is found, as members of the answer
routes      the routes: POST of a prompt or a request, GET of a request for pages

Nothing is booked, drawn or counted by it.
"""
