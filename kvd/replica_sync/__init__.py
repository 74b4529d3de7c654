"""Replicas that exchange events of requests.

plane           `ReplicaSync`: this process's port, its subscribers' keys, the events it publishes
replicas        `Replicas`: the replicas whose events are applied; which face takes an event
deduplication   `Deduplicator`: keeps events of replica sync out of the shared state
"""
