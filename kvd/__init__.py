"""kvd, the daemon: routes requests to the engines that have their prompts cached.

    client                       the library with which programs call kvd; the daemon does without
    cli                          the command line
    app                          the running daemon
    config, fleet_file           what an operator sets: settings; workers and replicas in a file
    faces                        the HTTP APIs, the gateway's among them
    gateway                      forwards clients' requests to engines
    selection, slots             which rank should serve a prompt; the load of running requests
    index                        which rank caches which block
    replica_sync, shared_state   replicas exchange request events; they share state in a server
    persistence                  state that outlives the process
    diagnosis                    why prompts do not match: `kvd doctor`
    replay                       `kvd replay`
    http, net                    connections of clients; to engines, replicas and peers
    wire                         formats and rules of what those connections carry, without I/O
    platform, telemetry          the operating system; logs and metrics
    model, errors                values that name things; failures as clients see them

The compiled package kvd_core has the data structures that every query and event passes through.
tests/unit/test_layering.py says which package may import which. docs/architecture.md follows a
query, an event and a reservation through the code, and says where to change what.
"""
