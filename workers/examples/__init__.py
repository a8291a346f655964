"""Jobs that ship: plain training scripts on data that comes with the dependencies."""
