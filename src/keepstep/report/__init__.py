"""Reports for people: verdicts, incident files, plots."""
