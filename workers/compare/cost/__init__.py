"""The model of cost: what an exchange takes, told from a few measured constants."""
