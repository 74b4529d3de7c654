"""The gateway's parts that need no socket."""
