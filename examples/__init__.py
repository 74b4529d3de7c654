"""Programs that use kvd as any other program would: through its command line, HTTP and ZMQ."""
