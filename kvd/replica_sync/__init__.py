"""Replicas that tell each other of requests.

plane      `ReplicaSync`: this process's port, the keys of its subscribers, what is published
aside      `Aside`: what replicas tell here is not told by another way, too
replicas   `Replicas`: those that are listened to; which face takes an event
"""
