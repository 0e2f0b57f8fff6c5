"""Jobs under a scheduler whose nodes, launchers and ranks are lost by seeds."""
