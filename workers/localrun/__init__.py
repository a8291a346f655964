"""`ps-run`: one command that starts a server and its workers on this machine."""
