"""How one run is made: its programs, their processes, and what they leave behind."""
