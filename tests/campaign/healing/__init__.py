"""Kills members of one ring while it trains."""
