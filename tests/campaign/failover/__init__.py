"""Kills a server's processes while they have standbys."""
