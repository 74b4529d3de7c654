"""State that replicas share through a Redis or Valkey server, so that each knows all bookings.

server      the client of the server that `--state-url` names (kvd.wire.state_address)
keys        the names of what is kept there
entries     one entry of the stream, one piece of a view: as bytes
outbox      `Outbox`: this process's own steps, numbered, in entries
mirror      `Mirror`: which writer's steps are in here, and what of theirs lives
views       a writer's whole view of what lives: written in slices, merged by others
members     `Members`: who else is there, where, how far
catalog     `Catalog`: registrations that were made by calls anywhere
session     what runs while the server is connected
service     `SharedState`: the part of the daemon that runs sessions, one after the other
none        `NoSharedState`: stands for it where no server is set
"""
