"""Reads and checks an experiment file: all rules, all problems with their position. No torch."""
