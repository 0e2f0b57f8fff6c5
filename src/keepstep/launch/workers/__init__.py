"""The processes of one incarnation: started, streamed, restarted, explained when they fail."""
