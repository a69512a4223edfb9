"""The full-screen view of ``watch``: what it reads of runs, how it shows that, and its keys."""
