"""Logger plug-ins: destinations of metric rows in addition to ``metrics.jsonl``."""
