"""Services of the operating system and the service manager.

activation    takes over listening sockets that a service manager has opened
sockets       opens listening sockets
sdnotify      notifies the service manager: ready, reloading, stopping, alive
signals       signals that a task waits for
descriptors   the limit of file descriptors, and its division
postponed     modules that are loaded when they are used, not when they are imported
memory        tunes the allocator and the collector, and gives free memory back
"""
