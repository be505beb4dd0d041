"""The holder's process: serves ranks and peers, executes the controller's orders."""
