"""The running daemon: what it starts, in which order, and how it stops.

daemon                       `run`: one process from its configuration to its exit code; the
                             nurseries and their order
processes                    `run`: the same for several processes of a gateway, and their kvd
apis                         `Apis`: the faces, each with its routes, its metrics and its
                             part of the fleet file
api_server                   `ApiServer`: one face on its sockets, with and without TLS
ports                        `Ports`: what is opened before anything runs
stopping, reloading          `Stop`, from the first signal on; `Reloader`, and the configuration
                             that holds
control                      the socket of `kvd reload`, and the command that asks over it
index_full_log, unmatched_log
                             log lines about an index that is full, and about questions that
                             never match
"""
