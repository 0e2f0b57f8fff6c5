"""Who is there and who plays which rank: rendezvous, re-forming, spares, elections, operator orders."""
