"""The selection service: which rank should serve a prompt, and what is booked on it.

    Selections                                                      service
      ├ workers: worker id ──> record, lifecycle, reasons           the catalog, and its changes
      ├ scheduler: select, wait, stop                               chooses ranks, at once or later
      ├ reservations: reservation id ──> Candidates                 ids are unique service-wide
      └ candidates: (model, tenant) ──> Candidates                  shared by the three
                                     ├ pool     kvd_core: the ranks that can be chosen, and what
                                     │          they are thought to cache (kvd_core.index)
                                     ├ ledger   kvd_core: their live requests
                                     └ queue    selections that wait, all their ranks being busy

Listeners of KV events are those of the registry, shared with the other faces. Changes of the
catalog are made one after the other and may wait for listeners to end; everything else is one
atomic step: between choosing a rank and booking it nothing is awaited.

    service                    `Selections`: the parts above, wired; what daemon and face use
    scheduler, queue           choices, at once or later; selections that wait
    immediate                  the usual selection, and the usual steps of a reservation, without
                               scheduler and observers; compiled
    weighing                   how a rank would be chosen: terms of its cost, by what, by chance
    requests, phases           a `SelectRequest` and what comes of it; prefill and decode apart
    reservations, retries      what is booked, until its end; answers that are asked for again
    serving                    what a booking counts and how an answer begins, for the scheduler and
                               for handlers that serve a selection at once; compiled
    decay                      how much output blocks of a reservation weigh towards its end
    workers, worker_record, admission
                               the catalog; a worker's record; what keeps one from being scheduled
    candidates, streams        a fleet's ranks that can be chosen; those whose engine has gone
    affinity, sessions         sessions and the ranks that they are bound to
    options, tuning            settings; what operators change at run time
    policies                   costs by name, each a row of weights
    decisions                  the decision log: a line a booked choice, without prompts
    speeds, regression         how fast ranks are, learned from their requests; the line through
                               those, compiled
    regret                     what was expected of choices, and what came of them
    readiness, stats           is it worth asking; what has become of every selection
"""
