"""The command line. Imports no torch: work that needs it runs in a child process."""
