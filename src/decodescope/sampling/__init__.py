"""From logits to one token: settings with their origin, pure filters, and the seeded draw."""
