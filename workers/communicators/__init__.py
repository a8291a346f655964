"""The communicator interface and its implementations: hub, ring and local."""
