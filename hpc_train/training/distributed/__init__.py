"""The distributed setup of a rank: environment, process group, device, precision, signals, consensus."""
