"""Logger plug-ins: where rows of metrics go besides ``metrics.jsonl``."""
