"""What is compared: rows, settings, and the plan of all runs."""
