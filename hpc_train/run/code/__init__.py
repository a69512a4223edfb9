"""The snapshot of the code that a run uses: selection, storage and verification of its files."""
