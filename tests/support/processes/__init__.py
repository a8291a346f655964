"""Programs under test, and what is left of them."""
