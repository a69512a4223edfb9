"""Strategy plug-ins: how ranks share a model and turn micro-batches into gradients."""
