"""Formats and meaning of messages from the network: no I/O, no clock, no logging.

event_stream                 `EventStream`: one stream and its health; composed of the next four:
stream_link                  the connection: its state, its status, its silence
engine_identity              the check whether the engine is still the same
applied_batches              the batches that were applied, and those that are lost for good
catch_up                     the held batch, and the replay of the batches before it
in_order                     the steps of a batch that is next, compiled
cursor, losses, stream_stats
                             judges a batch by its number; permanent losses by rank and tier;
                             counters
position                     the position of a stream, handed over to the next process
kv_events, standard_events   reads publishers' payloads; applies events of the KV Events standard
envelope, event_order        checks whether an event belongs to a registration; orders events by
                             their number
replay, replica, lifecycle, affinity, early_ends, dump
                             the messages of replays, replicas and dumps
egress, endpoints, urls, hosts, curve, state_address
                             the addresses that kvd may connect to; addresses, URLs and keys read
                             from texts
fields, unpack               members of msgpack structs, read strictly
"""
