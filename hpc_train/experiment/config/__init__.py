"""The experiment file: its schema, a YAML reader that records positions, and error messages. Imports no
torch.
"""
