"""The wire format: `control.proto`, `data.proto` and the stubs that `generate.py` makes from them."""
