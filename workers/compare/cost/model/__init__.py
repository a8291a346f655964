"""What an exchange takes, by formula, from a few measured constants."""
