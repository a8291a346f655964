"""What each family of launchers tells a process it started; `workers.launch` decides between them."""
