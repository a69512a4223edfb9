"""The experiment file: its schema, its reading with marks, its rules. Nothing here imports torch."""
