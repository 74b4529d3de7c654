"""What the daemon says of itself.

logs      one line for each change, as key=value fields or JSON
stderr    the descriptor of log lines, which is never waited for
metrics   counters, gauges and histograms, in the Prometheus text format
"""
