"""The experiment file: schema, a YAML reader that records positions, messages. Imports no torch."""
