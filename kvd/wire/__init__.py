"""Formats and meaning of messages from the network: no I/O, no clock, no logging.

event_stream                 `EventStream`: one stream and its health; composed of these four:
stream_link                  what its socket does: states, status, silence
engine_identity              is the engine the same as before: states, publishers
applied_batches              what was applied, and what is missing for good
catch_up                     the batch held back, and what a replay brings before it
cursor, losses, stream_stats
                             is a batch missing; what is lost for good; counters
position                     how far a stream was followed, for the process that goes on with it
kv_events, standard_events   events of publishers; what those of the KV Events standard mean
envelope, event_order        whose an event is; which one comes next
replay, replica, lifecycle, affinity, early_ends, dump
                             the messages of replays, replicas and dumps
egress, endpoints, urls, hosts, curve, state_address
                             where kvd may connect to; addresses, URLs and keys as texts
fields, unpack               members of msgpack structs, read strictly
"""
