"""From the records in the rings of a node's ranks to summaries, findings and states."""
