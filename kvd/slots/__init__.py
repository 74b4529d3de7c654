"""The load of live requests: the slot tracker, and the parts that it shares with selections.

trackers       `SlotTrackers`: workers and requests of each model and tenant
live_requests  `LiveRequests`: the life of requests, which slot trackers and reservations share;
               its `moments` report every step
rebooking      books requests of an earlier or another process in their present state
shared_loads   the loads that ledgers of different faces share
"""
