"""A file becomes runs: sweep, run ids, batch arithmetic. Everything here pickles; no torch."""
