"""Model plug-ins: a name of the file becomes an ``nn.Module``."""
