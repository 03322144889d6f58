"""The router: validates, chooses workers, retries, and streams text to clients."""
