"""Tests of the gateway's parts that need no socket."""
