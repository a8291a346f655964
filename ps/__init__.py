"""The hub: the parameter server's rules, transports and processes."""
