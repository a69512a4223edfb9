"""What ranks need to form a group: environment, process group, device, precision, signals, consensus."""
