"""`ps-run`: a server and some workers on this machine, as one command."""
