"""The built-in data sets, and the factory for user code."""
