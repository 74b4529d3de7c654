"""State that outlives the process, in a directory of its own, so that a restart can go on with it.

store           `StateStore`, `Keeper`: restores the state at the start and keeps it from then on
none            `NoKeeper`: stands for the keeper if there is no state directory
registrations   the registrations that calls have made, on all faces
reading         reads a directory's registrations and bookings
bookings        the bookings that are alive after a journal's records, and how they are restored
journal         `JournalWriter`: records bookings as they are made
snapshot        the index and the positions of its streams
holdings        the blocks and positions of the conductor's publishers
directory       `StateDirectory`: one owner, files that are replaced whole
frames          the form of these files: versions, headers, checksums
clocks          ages across a restart
metrics         `StoreStats`: what was kept and restored; metrics of it

docs/state.md says what operators may expect of it.
"""
