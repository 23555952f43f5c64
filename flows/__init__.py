"""What runs: one short file a flow, and the command line."""
