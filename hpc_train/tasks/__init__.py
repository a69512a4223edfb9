"""Task plug-ins: what a micro-batch's loss is and what evaluation sums up."""
