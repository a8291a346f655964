"""Support code that several tests share; this package holds no tests."""
