"""Messages off ZMQ sockets.

drain            receives through the libzmq that pyzmq has loaded
subscriber       a connection to a publisher that kvd speaks itself
sub_socket.hpp   its descriptor: what is read, and what has to be answered
zmtp.hpp         the protocol, without a descriptor
inbox.hpp        messages that wait, bounded by stream and by process
"""
