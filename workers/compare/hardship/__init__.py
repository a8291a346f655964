"""Hardships of training, the same for every row: slow links, slow workers, lost workers."""
