"""The plain files of a run folder: all code that creates, reads and checks them. Imports no torch."""
