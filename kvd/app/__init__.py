"""The running daemon: what it starts, in which order, and how it stops.

daemon                       `run`: one process from its configuration to its exit code; the
                             nurseries and their order
assembly                     the parts of a daemon, made from its configuration
filling                      `IndexFiller`: the index at the start, from a snapshot or a peer
processes                    `run`: the same for several gateway processes and the kvd that
                             chooses for them
apis                         `Apis`: the faces, each with its routes, its metrics and its
                             part of the fleet file
api_server                   `ApiServer`: one face on its sockets, with and without TLS
ports                        `Ports`: the sockets that are opened before anything runs
stopping, reloading          `Stop`: the stop after a signal; `Reloader`: the configuration in
                             force, and its reload
control                      the socket of `kvd reload`, and the command that uses it
index_full_log, unmatched_log
                             log lines about an index that is full, and about queries that
                             never match
"""
