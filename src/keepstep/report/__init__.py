"""What people read: verdicts, incident files, plots."""
