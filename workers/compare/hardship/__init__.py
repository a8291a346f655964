"""What makes training hard, done to every row alike: slow links, slow workers, lost workers."""
