"""The launcher's side of the controller: hosting it, connecting to it, electing its host."""
