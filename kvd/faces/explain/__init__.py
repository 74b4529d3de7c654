"""Explains why a request goes where it goes: /explain of every face, behind `kvd explain`.

    body ──> Question ─┬─ RankChooser.weigh: chances, terms of each rank's cost
                       └─ Traces: how far each rank caches the prompt, why it ends, what happened
                                                                        └─> Explanation, as JSON

questions   reads what a body asks about: a prompt, or a live request
traces      follows a prompt through the chronicle of its index
answers     writes the findings as members of the answer
schemas     what a question and an explanation contain
routes      POST /explain for a prompt or a live request; GET for a request, for links in pages

Explaining books, draws and counts nothing.
"""
