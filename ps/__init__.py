"""The hub: rules, wires and processes of the parameter server."""
