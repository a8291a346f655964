"""What the hub shows over HTTP: a live page for people, its numbers, and metrics for Prometheus."""
