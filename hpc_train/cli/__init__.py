"""The command line. Imports no torch: what needs it runs in a child process."""
