"""Model families that the embedded engine runs, one file each."""
