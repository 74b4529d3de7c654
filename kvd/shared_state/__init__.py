"""State that replicas share through a Redis or Valkey server, so that each knows all bookings.

server      the client of the server that `--state-url` names (kvd.wire.state_address)
keys        the names of the server's keys
entries     entries of the stream and pieces of views, as bytes
outbox      `Outbox`: this process's own steps, numbered, in entries
mirror      `Mirror`: the live requests of all processes, and how far each process was read
views       a writer's view of all live requests: written in slices, merged by others
members     `Member`: which other processes there are, their addresses, how far each has read
catalog     `Catalog`: registrations that calls to any replica have made
session     the tasks that run while the server is connected
service     `SharedState`: the part of the daemon that runs sessions, one after the other
none        `NoSharedState`: stands for it if no server is set
"""
