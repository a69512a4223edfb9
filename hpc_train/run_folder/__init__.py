"""Reading and writing the plain files of a run folder (DESIGN §6). No torch: every command uses it."""
