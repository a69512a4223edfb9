"""Turns a file into runs: sweep, run ids, batch arithmetic. Everything here can be pickled; imports
no torch.
"""
