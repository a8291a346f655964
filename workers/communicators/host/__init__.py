"""Exchanges between members on one host, through memory that all of them map."""
