"""Questions put to finished or running traces; nothing here runs a model."""
