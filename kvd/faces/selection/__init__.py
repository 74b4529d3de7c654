"""The routes of the selection service, member names, shapes. No state, no I/O."""
