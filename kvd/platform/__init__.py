"""Services of the operating system and the service manager.

activation    listening sockets that a service manager has opened
sdnotify      ready, reloading, stopping, and the watchdog
signals       signals as something that a task waits for
descriptors   how many descriptors there are, and what they are for
postponed     modules that are loaded when they are used, not when they are imported
memory        the allocator: what it keeps, and what it gives back
"""
