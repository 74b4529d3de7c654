"""Receives messages from ZMQ sockets.

drain            receives through the libzmq that pyzmq has loaded
subscriber       a subscription for which kvd speaks ZMTP itself
sub_socket.hpp   the subscriber's descriptor: reads messages, sends replies
zmtp.hpp         the ZMTP protocol, without a descriptor
inbox.hpp        messages that wait, bounded for each stream and for the process
"""
