"""The libraries that people use, in front of a gateway and simulated engines (`make clients`)."""
