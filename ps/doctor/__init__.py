"""`ps-server doctor`: examines a machine, and the path to a server, before a job does.

Reading the machine and judging what was read are separate functions, so that a test can see every message
on a machine that lacks nothing.
"""
