"""How an experiment slows a worker down: for how long, and where in a step it sleeps."""
