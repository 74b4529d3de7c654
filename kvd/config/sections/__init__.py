"""The rows of the settings, by subject; `kvd.config.settings` puts them together.

rows                         `section`, and rows of the usual types
listening, connecting        addresses, clients and requests; engines, workers, replicas and peers
routing, gateway             which rank serves a prompt; the gateway and its engines
state, process               the index, and what outlives or is shared; the daemon and its logs
"""
