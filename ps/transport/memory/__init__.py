"""Memory that processes of one host share, for all transports."""
