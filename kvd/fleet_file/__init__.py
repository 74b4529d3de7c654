"""The fleet file: workers, publishers and replicas that are registered without a call.

parse      the file to entries, by the readers that the faces have for bodies
follower   `FleetFileFollower`: adds, changes and removes what the file says, while the daemon
           runs
none       `NoFleetFile`: stands for the follower where no file is set
rows       the way back: registrations as rows of a fleet file
targets    where an entry of each table is registered
"""
