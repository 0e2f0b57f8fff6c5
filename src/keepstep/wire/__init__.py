"""Messages between launcher, agent and controller: typed, framed, authenticated."""
