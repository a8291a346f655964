"""Where the members of a ring find each other."""
