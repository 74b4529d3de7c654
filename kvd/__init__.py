"""kvd, the daemon: routes requests to the engines that have their prompts cached.

    client                       what programs ask kvd with; the daemon has no part of it
    cli                          the command line
    app                          the running daemon
    config, fleet_file           what an operator sets: settings; workers and replicas in a file
    faces                        its HTTP APIs, and the gateway's
    gateway                      requests of clients, on their way to engines
    selection, slots             which rank should serve a prompt; the load of running requests
    index                        who caches which block
    replica_sync, shared_state   replicas exchange events of requests; share state in a server
    persistence                  what outlives the process
    diagnosis                    why prompts do not match: `kvd doctor`
    replay                       `kvd replay`
    http, net                    sockets of clients; of engines, replicas and peers
    wire                         rules about what comes over those, without I/O
    platform, telemetry          the operating system; logs and metrics
    model, errors                values that name things; failures that clients are answered with

The structures that every question and event goes through are compiled: kvd_core. Who may import
whom is in tests/unit/test_layering.py; docs/architecture.md has the way of a query, of an event and
of a reservation, and says where to change what.
"""
