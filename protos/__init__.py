"""The wire in one place: `control.proto`, `data.proto` and the stubs made from them by `generate.py`."""
