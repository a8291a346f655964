"""A job: its members, its step rate, and the plan that splits parameters into slices."""
