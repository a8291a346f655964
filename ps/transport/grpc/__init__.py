"""Messages over gRPC streams."""
