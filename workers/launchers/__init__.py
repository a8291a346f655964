"""What each family of launchers tells a process it started; `placement` decides between them."""
