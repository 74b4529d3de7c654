"""A trace of requests replayed in simulated time against engines with prefix caches."""
