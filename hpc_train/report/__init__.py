"""Reports on runs, during and after training: metrics, progress, tables of runs. Imports no torch."""
