"""The load of running requests: what the slot tracker is, and what it shares with selections.

trackers       `SlotTrackers`: workers and requests of each model and tenant
live_requests  `LiveRequests`: the life of requests, which slot trackers and reservations share;
               its `moments` report every step
rebooking      requests of an earlier process, or of another one, booked here as they are now
shared_loads   the loads that ledgers of different faces share
"""
