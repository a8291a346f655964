"""`ps-server doctor`: looks at a machine, and at the way to a server, before a job does.

A family of checks has a file. What it reads of the machine and what it makes of that are functions of
their own, so that every sentence can be tested on a machine that lacks nothing.
"""
