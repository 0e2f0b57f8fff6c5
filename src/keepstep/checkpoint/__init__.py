"""The checkpoint engine: state in the memory of nodes first, on storage behind."""
