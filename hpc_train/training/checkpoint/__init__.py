"""Asynchronous checkpoints: staged in memory, written by a thread, committed by a rename."""
