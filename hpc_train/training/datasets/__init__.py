"""Data set plug-ins, and the path of samples to a rank: sampler, augmentation, loading."""
