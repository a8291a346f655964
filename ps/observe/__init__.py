"""What people and monitors see: logs, journal, health, metrics."""
