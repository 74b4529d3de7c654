"""ZMQ and peers: everything that waits for a socket other than a client's.

listener, listeners          reads one rank's events while it is registered; the tasks of all
                             listeners
sessions, link, backlog      keep a subscription alive, one link after another; the interface of
                             a link; received messages that wait to be applied
zmtp_link, zmq_link          the link where kvd speaks ZMTP itself; the link through libzmq
arrivals, heartbeats         one epoll set for all ZMTP links; one task that pings silent engines
per_run                      makes those two when a trio run first needs them
streams                      sockets for resolved addresses
replay, turns                fetches missing batches from an engine's replay server; shares the
                             loop's time among listeners
dialing, probing             resolves names into permitted addresses; finds out why an engine
                             cannot be reached
replication, publisher       exchanges lifecycle events of requests with replicas; its PUB socket
recovery, fetch              takes a peer's state at the start; gets one document from a peer
                             that may be hostile
curve, zsocket, supervisor, streamlog
                             CURVE keys; a ZMQ socket that a task can wait for; one task per
                             key; rate-limited log lines
"""
