"""The chart: what it renders, and what it refuses."""
