"""Task plug-ins: the loss of a micro-batch and the sums that evaluation adds up."""
