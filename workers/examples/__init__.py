"""The built-in jobs and other example training scripts."""
