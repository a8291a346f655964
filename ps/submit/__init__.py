"""`ps-server submit`: renders a job in its engine's format and sends it to the engine.

The engine starts the server and the workers, and passes the server's address to the workers.
"""
