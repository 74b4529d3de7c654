"""Logs and metrics of the daemon.

logs       one line for each change, as key=value fields or JSON
stderr     writes log lines to a descriptor without waiting for it
rotating   writes lines to a file of bounded size, in a thread
stretches  how long the loop is busy between two polls, and with what
counts     counts of requests and of values by bucket, compiled
metrics    counters, gauges and histograms, in the Prometheus text format
merging    joins the metrics of several processes into one text
"""
