"""The full-screen view of ``watch``: reading runs, showing them, and its keys."""
