"""A deterministic simulation of a fleet: engines, the way to them, and two replicas of kvd.

    Engine (engine.py)          an honest cache in plain Python; all batches that it has published
      │ Network (network.py)    connections that break, stall, lose and repeat; replay servers
    Replica (replica.py)        kvd's own listeners, replays, registry, state, index and recovery
      │
    World (world.py)            chaos by seed, then healing; Oracle (oracle.py) compares throughout

Time is virtual, also in turns (`kvd.net.turns`), sockets are simulated, and trio's scheduler draws
from the seed, too, so a seed always has the same life. To run many seeds:
`python -m tests.simulation --seeds 0-999`.
"""
