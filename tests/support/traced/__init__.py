"""A job whose processes record which functions of the sources they call."""
