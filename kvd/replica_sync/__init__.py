"""Replicas that tell each other of requests.

plane           `ReplicaSync`: this process's port, the keys of its subscribers, what is published
replicas        `Replicas`: those that are listened to; which face takes an event
deduplication   `Deduplicator`: what replicas tell here is not told through shared state, too
"""
