"""Rendezvous backends: where a run's state and roster are kept."""
