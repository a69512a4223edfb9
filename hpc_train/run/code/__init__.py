"""The snapshot of the code that a run uses: which files, where it is stored, whether it is intact."""
