"""Data set plug-ins, and how samples reach a rank: sampler, augmentation, loading."""
