"""A job: its members, its step rate, and the plan that cuts parameters into slices."""
