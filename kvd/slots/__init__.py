"""The load of running requests, as the slot tracker accounts for it.

trackers       `SlotTrackers`: workers and requests of each model and tenant
shared_loads   the loads that ledgers of different faces share
"""
