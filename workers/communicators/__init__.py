"""One interface, and its implementations: hub, ring, alone."""
