"""The rows of the bench: `row` lists them, and the other files implement their members."""
