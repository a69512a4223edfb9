"""What has to be known of data sets and tasks without importing torch, and how samples are counted so."""
