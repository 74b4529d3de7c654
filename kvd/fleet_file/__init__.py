"""The fleet file: what is registered without a call: workers, engines, policies, replicas.

parse      reads the file into entries, with the readers that the faces have for bodies
write      the reverse: registrations as rows of a fleet file
follower   `FleetFileFollower`: adds, changes and removes registrations as the file says, while
           the daemon runs
none       `NoFleetFile`: stands in for the follower where no file is set
targets    where an entry of each table is registered
"""
