"""`ps-server submit`: a job as what its engine reads, and handed over to it.

Nothing here starts a worker. Each engine's file says a job in the engine's own
words; the server's address travels by the engine's own means.
"""
