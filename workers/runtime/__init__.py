"""The state of one training process."""
