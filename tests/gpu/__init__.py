"""All that needs a GPU, run by `make gpu`."""
