"""Replicas that exchange events of requests.

plane           `ReplicaSync`: this process's port, the keys of its subscribers, what is published
replicas        `Replicas`: those that are listened to; which face takes an event
deduplication   `Deduplicator`: what replica sync brings is not sent through shared state, too
"""
