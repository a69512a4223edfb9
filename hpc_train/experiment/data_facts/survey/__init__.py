"""The content of a data root, for ``init``: its data set, samples, classes and image sizes.

Counts come from file names and lists; the rest from the headers of an even sample of files. No torch.
"""
