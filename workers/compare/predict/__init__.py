"""The cost model: predicts the time of an exchange from a few measured constants."""
