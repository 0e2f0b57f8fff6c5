"""What is done about slowdowns: shares of micro-batches, exchanged nodes, replaced nodes."""
