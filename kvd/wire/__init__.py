"""What comes over the wire, and what it means: no I/O, no clock, no logging.

event_stream                 `EventStream`: one stream's place, health and losses; judges each
                             batch
cursor, losses, counts       is a batch missing; what is lost for good; counters
kv_events, standard_events   events of publishers; what those of the KV Events standard mean
envelope, event_order        whose an event is; which one comes next
replay, replica, lifecycle, affinity, early, dump
                             the messages of replays, replicas and dumps
egress, endpoints, urls, hosts, curve
                             where kvd may connect to; addresses, URLs and keys as texts
fields, unpack               members of msgpack structs, read strictly
"""
