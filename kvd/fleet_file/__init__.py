"""The fleet file: workers, publishers and replicas that are registered without a call.

parse      the file to entries, by the readers that the faces have for bodies
follower   `FleetFileFollower`: adds, changes and removes what the file says, while the daemon
           runs
rows       the way back: registrations as rows of a fleet file
targets    where an entry of each table is registered
"""
