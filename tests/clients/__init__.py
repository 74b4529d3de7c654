"""Popular client libraries in front of a gateway and simulated engines (`make clients`)."""
