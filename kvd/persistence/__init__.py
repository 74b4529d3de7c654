"""State that outlives the process: what a restart goes on with, in a directory of its own.

store           `StateStore`, `Keeper`: what the daemon restores at its start and keeps from then on
none            `NoKeeper`: stands for the keeper where there is no state directory
registrations   who was registered by calls, on all faces
reading         what a directory has of registrations and bookings
bookings        what lives after a journal's records, and how it comes back
journal         `JournalWriter`: the bookings, as they are made
snapshot        the index, and where its streams were
holdings        the same of the conductor's publishers
directory       `StateDirectory`: one owner, files that are replaced whole
frames          the form of these files: versions, headers, checksums
clocks          ages across a restart

docs/state.md says what an operator may expect of it.
"""
