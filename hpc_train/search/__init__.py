"""Searches: which trials an experiment's runs are, and the values that a method proposes for the next."""
