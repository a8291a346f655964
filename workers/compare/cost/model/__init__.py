"""Formulas for the time of an exchange, from a few measured constants."""
