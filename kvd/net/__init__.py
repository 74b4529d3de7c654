"""ZMQ and peers: everything that waits for a socket other than a client's.

listener, listeners          one engine's events for as long as its rank is registered; the
                             tasks of all
sessions, link, backlog      one subscription over link after link; what a link has to offer;
                             messages that wait
zmtp_link, zmq_link          links that kvd speaks itself, and that libzmq does
arrivals, streams            the descriptors of the former; sockets to addresses
replay, turns                batches that are missing, asked for from the engine's replay
                             server
dialing, probing             names to addresses that may be connected to; why an engine cannot
                             be reached
replication, publisher       events of requests, sent to replicas and received from them
recovery, fetch              the state of a peer at the start; one document from a peer that
                             may be hostile
curve, zsocket, supervisor, streamlog
                             keys; a socket that a task can wait for; tasks by name; log lines
"""
