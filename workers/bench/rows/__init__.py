"""The ways to exchange: `row` lists them, and each other file is what a member of one does."""
