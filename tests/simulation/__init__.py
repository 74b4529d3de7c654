"""A deterministic simulation of a fleet: engines, the way to them, and two replicas of kvd.

    Engine (engine.py)          an honest cache in plain Python; what it has said, batch by batch
      │ Network (network.py)    connections that break, stall, lose and repeat; replay servers
    Replica (replica.py)        kvd's own listeners, replays, registry, state, index and recovery
      │
    World (world.py)            chaos by seed, then healing; Oracle (oracle.py) compares throughout

Time is virtual, also that of turns (`kvd.net.turns`), sockets are simulated, and trio's scheduler
draws from the seed, too: a seed always has the same life. Many of them:
`python -m tests.simulation --seeds 0-999`.
"""
