"""The status page and who looks at it."""
