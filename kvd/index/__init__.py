"""The index of each model and tenant, and the registrations that feed it.

partitions      `State`: one prefix index for each model and tenant; everything that changes one
registry        `Registry`: ranks registered by the indexer, the selection service and files
publishers      `Publishers`: publishers registered with the conductor
served_models   which models and tenants are served here, and who serves others
listening       what both do with their listeners: addresses, capacity, start and end
capacity        how many listeners the two may have together
dumps           the index as a dump, in both forms
restore         a dump into the state: all of it, or nothing
peers           the peers that an operator has named
metrics         what /metrics says of streams and of the index
"""
