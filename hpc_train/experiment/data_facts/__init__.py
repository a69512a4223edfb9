"""Facts about data sets and tasks that are available without importing torch, such as sample counts."""
