"""The exchange of gradients during backward: passes, buckets that are sent together, and overlap."""
