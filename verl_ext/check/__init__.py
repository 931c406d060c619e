"""`invoke check-sandbox`: what an account of a sandbox service can do, measured, and what follows for a run."""
