"""The remedies of slowdowns: shares of micro-batches, exchanged nodes, replaced nodes."""
