"""Child processes: how one of our own programs is started, watched and ended."""
