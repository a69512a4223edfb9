"""What a rank stands on: its facts, process group, device, precision, signals and agreement."""
