"""The hub's HTTP server: a live status page, the status as JSON, and metrics for Prometheus."""
