"""The selection service: chooses the rank that should serve a prompt, and books the request there.

    Selections                                                      service
      ├ workers: worker id ──> record, lifecycle, reasons           the catalog, and its changes
      ├ scheduler: select, wait, stop                               serves, at once or later
      ├ chooser: choose, weigh                                      which rank; books nothing
      ├ reservations: reservation id ──> Candidates                 ids are unique service-wide
      └ candidates: (model, tenant) ──> Candidates                  shared by all of these
                                     ├ pool     kvd_core: the ranks that can be chosen, and the
                                     │          blocks that they should cache (kvd_core.index)
                                     ├ ledger   kvd_core: their live requests
                                     └ queue    selections that wait because their ranks are busy

The registry's listeners receive the KV events; all faces share them. Changes of the catalog run one
after the other and may wait for listeners to end. Everything else is one atomic step: no code
awaits between choosing a rank and booking it.

    service                    `Selections`: the parts above, wired for the daemon and the face
    scheduler, queue           serves selections, at once or later; those that wait
    chooser, replies           chooses a rank for a matched prompt, or weighs all; the answers
    immediate                  ordinary selections, and steps of reservations, that need neither
                               scheduler nor observers; compiled
    weighing                   how a rank would be chosen: the basis, costs and their terms, chances
    requests, phases           a `SelectRequest`, its choice and its reply; prefill and decode apart
    reservations, retries      live bookings, until their end; answers kept for retried requests
    serving                    the tokens that a booking counts and the beginning of an answer, for
                               the scheduler and for hot handlers; compiled
    decay                      how the weight of a reservation's output blocks falls towards its end
    workers, membership        the catalog; how its workers join their candidates, and leave them
    worker_record, admission   a worker's record; what keeps it from being scheduled
    candidates, streams        the ranks of a model and tenant that can be chosen; ranks whose
                               engine has gone
    affinity, sessions         sessions and the ranks that they are bound to
    options, tuning            settings; changes that operators make at run time
    policies                   named costs, each a row of weights
    decisions                  the decision log: one line for each booked choice, without its prompt
    speeds, regression         how fast ranks are, learned from their requests; fits a line to
                               observations, compiled
    regret                     the expected and the actual outcomes of choices
    readiness, stats           whether the service is ready to select; counts of all selections
"""
