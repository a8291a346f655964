"""`ps-server doctor`: checks a machine, and the connection to a server, before a job runs.

Each check reads the machine in one function and judges the result in another. Tests can therefore produce
every message on a healthy machine.
"""
