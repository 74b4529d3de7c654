"""Messages off ZMQ sockets.

drain       receives through the libzmq that pyzmq has loaded
inbox.hpp   messages that wait, bounded by stream and by process
"""
