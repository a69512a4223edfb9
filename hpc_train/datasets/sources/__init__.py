"""The built-in data sets, and the factory for the user's own."""
