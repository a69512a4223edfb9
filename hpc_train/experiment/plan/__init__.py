"""Turns a file into runs: sweep, ids, batch arithmetic. All can be pickled; imports no torch."""
