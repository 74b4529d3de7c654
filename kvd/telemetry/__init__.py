"""Logs and metrics of the daemon.

logs       one line for each change, as key=value fields or JSON
stderr     the descriptor of log lines, which is never waited for
rotating   lines into a file of bounded size, by a thread
stretches  how long the loop is busy between two polls, and with what
metrics    counters, gauges and histograms, in the Prometheus text format
merging    metrics of several processes as one text
"""
