"""A served model over HTTP: OpenAI's API, recorded runs, metrics; everything behind one guard."""
