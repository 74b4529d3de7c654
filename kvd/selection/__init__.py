"""The selection service: which rank should serve a prompt, and what is booked on it.

    Selections                                                      service
      ├ workers: worker id ──> record, lifecycle, reasons           the catalog, and its changes
      ├ scheduler: select, wait, stop                               who serves, at once or later
      ├ reservations: reservation id ──> Fleet                      ids are unique service-wide
      └ fleets: (model, tenant) ──> Fleet                           shared by the three
                                     ├ pool     kvd_core: the ranks that can be chosen
                                     ├ ledger   kvd_core: their live requests
                                     └ queue    selections that wait, all their ranks being busy

Listeners of KV events are those of the registry, shared with the other faces. Changes of the
catalog are made one after the other and may wait for listeners to end; everything else is one
atomic step: between choosing a rank and booking it nothing is awaited.
"""
