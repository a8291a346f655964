"""What is written of findings, beside the page: tables, logs, scalars."""
