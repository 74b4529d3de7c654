"""The index of each model and tenant, and the registrations that feed it.

partitions      `State`: a prefix index for each model, tenant and block size; all that changes it
registry        `Registry`: ranks registered by the indexer, the selection service and files
publishers      `Publishers`: publishers registered with the conductor
served_models   the models and tenants that this process serves, and the owners of others
listening       what ranks and publishers share: addresses, capacity, start and end of listeners
capacity        the limit of listeners in the process
dumps           the index as a dump, in both forms
restore         a dump into the state: all of it, or nothing
peers           the peers that operators have named
metrics         the families of /metrics about streams and the index
"""
