"""A model that serves many clients at once: requests queue, join, share passes, leave, and are recorded."""
