"""State that replicas share through a Redis or Valkey server, so that each knows all bookings.

server      the client of the server that `--state-url` names (kvd.wire.state_address)
keys        the names of the server's keys
entries     entries of the stream, as bytes
pieces      heads and pieces of views, as bytes
requests    what is known of a request here, and as steps and views of others describe it
outbox      `Outbox`: this process's own steps, numbered, in entries
mirror      `Mirror`: the live requests of all processes
booked      `BookedHere`: the faces' requests, changed by the steps of others
held        `HeldSteps`: steps that came before their booking
progress    `Progress`: how far the steps of each process are known here
views       a writer's view of all live requests: written in slices
merge       `Merge`: takes over another writer's view
fleet       `KnownFleet`: what is known of the others, from one session to the next
members     `Member`: which other processes there are, their addresses, how far each has read
catalog     `Catalog`: registrations that calls to any replica have made
writer      `StreamWriter`: writes our steps to the stream
reader      `StreamReader`: follows the stream, and reads views after a gap
known       `KnownState`: all that outlives a session; `SessionPart`: what uses it while connected
session     the tasks that run while the server is connected
service     `SharedState`: the part of the daemon that runs sessions, one after the other
metrics     metrics of sessions, steps and views
none        `NoSharedState`: stands for it if no server is set
"""
